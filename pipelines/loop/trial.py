"""Trial of a script before its run: the body of one step, with the whole model in one process."""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from actors.runtime.program import Evaluation
from pipelines.loop.grouping import GroupingTrial
from pipelines.loop.loop import Loop
from pipelines.loop.microbatch_state import MicrobatchStates
from pipelines.loop.prepared.errors import LoopMisused
from pipelines.loop.step import Position
from pipelines.loop.thread import Request
from pipelines.training.custom.custom_workload import CustomWorkload
from pipelines.training.custom.modules.block_flow import in_dtypes
from pipelines.training.custom.modules.custom_module import parameter_bytes, seeded
from pipelines.training.custom.modules.custom_pipeline import CustomBatch
from pipelines.training.workload.parallel_groups import ALONE

MAX_BYTES = 1 << 28
"""The parameters of the largest model that is tried: the trial needs as much again for a copy, and
for gradients, and the user waits for it."""
NUM_MICROBATCHES = 2


def try_body(loop: Loop, workload: CustomWorkload, compares: bool = True) -> str | None:
    """Find what would fail on each worker in its warm-up: run the script up to its first step, and
    the body of that on the host. Returns a note for the user if the loss `compares` unequal to
    that of its parts.

    What follows the body does not run: it may write files that a resumed run needs. Raises
    `LoopMisused`, and what the script raises.
    """
    if parameter_bytes(loop.declaration.model) > MAX_BYTES:
        return None
    module = in_dtypes(workload.recipe.model(), workload.recipe)
    # What the body prints belongs to the workers' logs.
    with seeded(workload.settings.seed), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        loop.begin(1, Position(), lambda: loop.state.kept())
        while loop.await_arrival() and loop.request is not None:
            loop.answer(_answer(loop.request, workload))
        if loop.left_after is not None:
            return None
        states, settings = loop.declaration.states, workload.settings
        is_divided = settings.microbatch > 1 and settings.num_microbatches > 1
        compares = compares and is_divided and not states.states
        engine = _TrialEngine(workload, states, GroupingTrial(module) if compares else None)
        try:
            sums = loop.compute(engine, module)
        except Exception:
            if not engine.is_comparing:
                raise
            sums = []  # the body needs microbatches of the declared size
    if not sums:
        loop.restart_script()
        return try_body(loop, workload, compares=False)
    _refuse_no_gradient(module)
    return engine.grouping.note(sums[NUM_MICROBATCHES:]) if engine.grouping else None


class _TrialEngine:
    """An engine of the first samples; see `pipelines.loop.step.Engine`."""

    def __init__(
        self, workload: CustomWorkload, states: MicrobatchStates, grouping: GroupingTrial | None
    ) -> None:
        size = workload.settings.microbatch
        samples = workload.first(NUM_MICROBATCHES * size)
        self.grouping = grouping
        self._parts = [samples[first : first + size] for first in range(0, len(samples), size)]
        self._compared: list[list[Any]] = []
        if grouping:
            items = workload.items(self._parts[0])  # once: they may be augmented at random
            self._compared = [items[: size // 2], items[size // 2 :], items]
        self.num_microbatches = len(self._parts) + len(self._compared)
        self.is_comparing = False
        """Whether the microbatch is one that is only compared."""
        self._num_begun = 0
        self._workload = workload
        self._states = states

    def next(self) -> CustomBatch:
        torch.clear_autocast_cache()
        number, workload = self._num_begun, self._workload
        self._num_begun += 1
        self.is_comparing = number >= NUM_MICROBATCHES
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

    def _read(self, number: int) -> CustomBatch:
        return self._workload.read(self._parts[number])

    def _compared_batch(self, number: int) -> CustomBatch:
        assert self.grouping is not None
        self.grouping.begin()
        self.grouping.before()
        batch = self._workload.batch_of(deepcopy(self._compared[number - NUM_MICROBATCHES]))
        self.grouping.after()
        return batch


def _answer(request: Request, workload: CustomWorkload) -> Any:
    """The model has the values of step 0 already; its loss does not matter."""
    if request is Request.EVALUATION:
        return Evaluation(1.0, dict.fromkeys(workload.metrics, 1.0))
    return None


def _refuse_no_gradient(module: nn.Module) -> None:
    if all(parameter.grad is None for parameter in module.parameters()):
        raise LoopMisused(
            "step 1: the losses of `step.backward(loss)` do not depend on the model's parameters: "
            "compute them with the model that run.prepare returns"
        )
