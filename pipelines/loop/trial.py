"""Trial of a script before its run: the body of one step, with the whole model in one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from actors.runtime.program import Evaluation
from pipelines.errors import UserError, first_line
from pipelines.loop.body_changes import BodyChanges
from pipelines.loop.grouping import CPU, OF_PASS, GroupingTrial
from pipelines.loop.loop import Loop
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.microbatch_state import MicrobatchStates
from pipelines.loop.step import Position
from pipelines.loop.thread import Request
from pipelines.settings.user_code import prints_dropped
from pipelines.training.attention.cut_sequences import (
    COMPUTED_AGAIN,
    AttentionRefused,
    HalvesTrial,
    refuse_other_sums,
)
from pipelines.training.custom.custom_workload import CustomWorkload
from pipelines.training.custom.module_calls import BodyTrial, CallRecorder
from pipelines.training.custom.modules.block_flow import in_dtypes
from pipelines.training.custom.modules.custom_module import parameter_bytes, seeded
from pipelines.training.custom.modules.custom_pipeline import CustomBatch
from pipelines.training.replica.own_changes import OwnChanges
from pipelines.training.workload.parallel_groups import ALONE
from pipelines.training.workload.seeds import generator_states
from pipelines.training.workload.state import buffers

MAX_BYTES = 1 << 28
"""The parameters of the largest model that is tried: the trial needs as much again for a copy, and
for gradients, and the user waits for it."""
NUM_MICROBATCHES = 2


def try_body(loop: Loop, workload: CustomWorkload, compares: bool = True) -> str | None:
    """Find what would fail on each worker in its warm-up: run the script up to its first step, and
    the body of that on the host. Returns a note for the user if the loss `compares` unequal to
    that of its parts. The workload gets the calls of its model, for the trial of `tp`.

    What follows the body does not run: it may write files that a resumed run needs. Raises
    `LoopMisused`, and what the script raises.
    """
    if parameter_bytes(loop.declaration.model) > MAX_BYTES:
        return None
    module = in_dtypes(workload.recipe.model(), workload.recipe)
    with seeded(workload.settings.seed), prints_dropped():
        _bring_to_body(loop, workload)
        if loop.left_after is not None:
            return None
        states, settings = loop.declaration.states, workload.settings
        in_one_pass = loop.declaration.in_one_pass
        is_divided = settings.microbatch > 1 and settings.num_microbatches > 1
        compares = compares and is_divided and not states.states and not in_one_pass
        recorder = CallRecorder(module)
        size, num_tried = settings.microbatch, NUM_MICROBATCHES
        if in_one_pass:  # the body gets no more than its declared batch
            num_tried = min(num_tried, settings.num_microbatches)
        samples = workload.first(num_tried * size)
        parts = [samples] if in_one_pass else [samples[:size], samples[size:]]
        grouping = GroupingTrial(module) if compares else None
        compared = _halves_and_whole(workload, parts[0]) if compares else []
        engine = _TrialEngine(workload, states, module, parts, compared, grouping, recorder)
        own_changes = OwnChanges([module])
        try:
            with recorder:
                sums = loop.compute(engine, module)
        except Exception:
            if not engine.is_comparing:
                raise
            sums = []  # the body needs microbatches of the declared size
    if not sums:
        loop.restart_script()
        return try_body(loop, workload, compares=False)
    own_changes.refuse()
    _refuse_no_gradient(module)
    named = module.named_parameters()
    trained = frozenset(name for name, parameter in named if parameter.grad is not None)
    why_no_cp = _why_no_cp(loop, workload) if workload.recipe.sequence else None
    workload.body = BodyTrial(recorder.calls, trained, why_no_cp)
    if in_one_pass and settings.num_microbatches > 1:
        return _note_on_parts(loop, workload)
    return engine.grouping.note(sums[NUM_MICROBATCHES:]) if engine.grouping else None


def _note_on_parts(loop: Loop, workload: CustomWorkload) -> str | None:
    """A note for the user if the loss of a pass is not the mean of those of its halves. The script
    computes each from its beginning, as what follows a body must not run."""
    module = in_dtypes(workload.recipe.model(), workload.recipe)
    sums, grouping = [], GroupingTrial(module)
    with seeded(workload.settings.seed), prints_dropped():
        samples = workload.first(NUM_MICROBATCHES * workload.settings.microbatch)
        for part in _halves_and_whole(workload, samples):
            loop.restart_script()
            _bring_to_body(loop, workload)
            states = loop.declaration.states
            engine = _TrialEngine(workload, states, module, [], [part], grouping)
            try:
                sums += loop.compute(engine, module)
            except Exception:
                return None  # the body needs a batch of the declared size
    return grouping.note(sums, OF_PASS)


def _halves_and_whole(workload: CustomWorkload, samples: Sequence[int]) -> list[list[Any]]:
    items, half = workload.items(samples), len(samples) // 2  # once: they may be augmented
    return [items[:half], items[half:], items]


def _why_no_cp(loop: Loop, workload: CustomWorkload) -> str | None:
    """The reason why `cp` cannot cut the sequences of the batches, or None: the body of a step gets
    whole sequences, and the parts of two ranks."""
    recipe, settings = workload.recipe, workload.settings
    module = in_dtypes(recipe.model(), recipe)
    try:
        with seeded(settings.seed), prints_dropped():
            engine = _HalvesEngine(workload, module)
            loop.restart_script()
            _bring_to_body(loop, workload)
            sums = loop.compute(engine, module)
            if engine.draws:
                return "a pass draws random numbers, as dropout does: each rank would draw others"
        engine.trial.refuse(
            [(part.loss, part.num_tokens) for part in sums],
            "pass step.backward the mean over the tokens, and their number as weight",
        )
        module.eval()
        for loss in (recipe.evaluation, *recipe.metrics.values()):
            if loss is not None:
                batch = workload.example(settings.microbatch, held_out=True).value
                refuse_other_sums(module, batch, recipe.sequence, loss)
    except UserError as error:
        return str(error).removeprefix("cp: ")
    except Exception as error:  # the script's own code raises any type
        return (
            f"the body fails with half of a sequence: {type(error).__name__}: {first_line(error)}"
        )
    return None


class _HalvesEngine:
    """An engine of whole and of cut sequences; see `pipelines.loop.step.Engine`."""

    num_microbatches = HalvesTrial.num_passes

    def __init__(self, workload: CustomWorkload, module: nn.Module) -> None:
        for part in module.modules():
            part.register_forward_pre_hook(self._refuse_again)
        self._is_over = False
        """Whether the forward of a pass is: its backward sees none of the modes of the forward."""
        self._batch = workload.example(workload.settings.microbatch)
        self.trial = HalvesTrial(self._batch.value, workload.recipe.sequence)
        self._num_begun = 0
        self._attention = ExitStack()
        self._generators: list[Any] = []
        self.draws = False
        """Whether a forward pass draws random numbers."""

    def next(self) -> CustomBatch:
        self._attention.close()
        torch.clear_autocast_cache()
        attention, value = self.trial.of_pass(self._num_begun)
        self._num_begun += 1
        self._attention.enter_context(attention)
        self._is_over = False
        self._generators = generator_states(CPU)
        return self._batch._replace(value=value)

    def forwarded(self, count: Tensor) -> None:
        self.draws |= generator_states(CPU) != self._generators
        self._attention.close()
        self._attention.enter_context(AttentionRefused())
        self._is_over = True

    def called(self) -> None:
        """Nothing follows a pass."""

    def all_backwarded(self) -> None:
        """Nothing follows the passes."""

    def left(self) -> None:
        self._attention.close()
        self._is_over = False

    def _refuse_again(self, part: nn.Module, inputs: Any) -> None:
        if self._is_over:
            raise UserError(COMPUTED_AGAIN)


class _TrialEngine:
    """An engine of the first samples; see `pipelines.loop.step.Engine`."""

    def __init__(
        self,
        workload: CustomWorkload,
        states: MicrobatchStates,
        module: nn.Module,
        parts: Sequence[Sequence[int]],
        compared: Sequence[list[Any]] = (),
        grouping: GroupingTrial | None = None,
        recorder: CallRecorder | None = None,
    ) -> None:
        """A body computes the samples of each of the `parts`, and then what is `compared`."""
        self.grouping = grouping
        self._parts = parts
        self._compared = compared
        self.num_microbatches = len(self._parts) + len(self._compared)
        self.is_comparing = False
        """Whether the microbatch is one that is only compared."""
        self._num_begun = 0
        self._recorder = recorder
        self._workload = workload
        self._states = states
        self._changes = BodyChanges(lambda: dict(buffers(module)))

    def next(self) -> CustomBatch:
        self._changes.refuse()
        torch.clear_autocast_cache()
        number, workload = self._num_begun, self._workload
        self._num_begun += 1
        if number and self._recorder:
            self._recorder.stop()
        self.is_comparing = number >= len(self._parts)
        batch = self._compared_batch(number) if self.is_comparing else self._read(number)
        workload.seed_forward(number)
        device = torch.device("cpu")
        self._states.begin_microbatch(number, workload.dtype, device)
        fed = workload.feed(batch, device, ALONE, number)
        if self.grouping:
            self.grouping.before()
        return fed

    def forwarded(self, count: Tensor) -> None:
        if self.grouping and self.is_comparing:
            self.grouping.after()
        self.is_comparing &= self._num_begun < self.num_microbatches

    def called(self) -> None:
        self._changes.note()

    def all_backwarded(self) -> None:
        self._changes.refuse()

    def left(self) -> None:
        """Nothing is open."""

    def _read(self, number: int) -> CustomBatch:
        return self._workload.read(self._parts[number])

    def _compared_batch(self, number: int) -> CustomBatch:
        assert self.grouping is not None
        self.grouping.begin()
        self.grouping.before()
        batch = self._workload.batch_of(deepcopy(self._compared[number - len(self._parts)]))
        self.grouping.after()
        return batch


def _bring_to_body(loop: Loop, workload: CustomWorkload) -> None:
    """Let the script run up to the body of its first step."""
    loop.begin(1, Position(), lambda: loop.state.kept())
    while loop.await_arrival() and loop.request is not None:
        loop.answer(_answer(loop.request, workload))


def _answer(request: Request, workload: CustomWorkload) -> Any:
    """The model has the values of step 0 already, and its optimizers have no state; the loss does
    not matter."""
    if request is Request.EVALUATION:
        return Evaluation(1.0, dict.fromkeys(workload.metrics, 1.0))
    return {}


def _refuse_no_gradient(module: nn.Module) -> None:
    if all(parameter.grad is None for parameter in module.parameters()):
        raise LoopMisused(
            "step 1: the losses of `step.backward(loss)` do not depend on the model's parameters: "
            "compute them with the model that run.prepare returns"
        )
