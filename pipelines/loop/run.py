"""The `run` object of a custom training loop: preparation of objects, and iteration over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import currentframe
from types import FrameType
from typing import Any

from torch import Tensor, nn

from actors.runtime.program import Evaluation
from pipelines.errors import UserError
from pipelines.loop.declaration import (
    Declaration,
    EvaluationSetup,
    Reduction,
    StepCounts,
    in_one_pass,
)
from pipelines.loop.epochs import EpochSteps, epochs_of
from pipelines.loop.modules.module_numbers import ModuleNumbers
from pipelines.loop.prepared.called_module import CalledModels
from pipelines.loop.prepared.loader_loop import parts_of_batch
from pipelines.loop.prepared.optimizer_factory import ScriptOptimizerFactory
from pipelines.loop.prepared.prepared_objects import PreparedObjects, refuse_counts
from pipelines.loop.prepared.script_moment import Moment
from pipelines.loop.prepared.tensor_plans import TensorPlans
from pipelines.loop.state.carried_state import CarriedState
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.frame_locals import caller_of
from pipelines.loop.state.kept_objects import KeptObjects
from pipelines.loop.state.microbatch_state import CarriedTensor, MicrobatchStates
from pipelines.loop.state.named_values import NamedValues
from pipelines.loop.state.script_variables import ScriptVariables
from pipelines.loop.step import Step
from pipelines.settings.recipe import Dataset
from pipelines.training.models.joined_model import joined
from pipelines.training.workload.clipping import Clipping

_print = print


class Run:
    """The argument of the script's function: call `prepare`, then loop over `steps`."""

    def __init__(
        self,
        begin: Callable[[Declaration], Iterator[Step]],
        models: CalledModels,
        evaluate: Callable[[], Evaluation],
        gather_optimizer: Callable[[], Mapping[str, Tensor]] = dict,
        prints_early: bool = False,
    ) -> None:
        """`begin` starts the steps of a declaration; `models` receive the calls of those that are
        prepared; `evaluate` evaluates on all workers, and `gather_optimizer` gathers the whole
        optimizer state by its names in the run. `prints_early`: what the script prints in front of
        its loop appears here."""
        self._prints_early = prints_early
        self._begin = begin
        self._models, self._at = models, models.at
        self._evaluate = evaluate
        self._objects = PreparedObjects(models, gather_optimizer)
        self._kept = KeptObjects()
        self._states = MicrobatchStates()
        self._evaluation: EvaluationSetup | None = None
        self._plans = TensorPlans()
        self._sequence: dict[str | int, int] = {}

    def prepare(
        self,
        *objects: Any,
        plan: Mapping[str, Any] | None = None,
        tp_divides: int | None = None,
        sequence: Mapping[str | int, int] | None = None,
        experts: Sequence[str] = (),
    ) -> Any:
        """Wrap a model, its optimizers, learning-rate schedulers and a loader for use in the loop.

        Pass them in any order, in one call or several; the wrappers are returned in the same order.
        The loader's `batch_size` is the microbatch size. The schedule counts steps. `plan` names
        the layers of the model that `tp` shards, and `tp` must divide `tp_divides`; `sequence` is
        the dim of the tensors of a batch that `cp` cuts, by their keys; `experts` names the modules
        whose experts `ep` deals to ranks; see `Recipe`. Raises `LoopMisused` for an object that
        cannot survive a change of the workers.
        """
        if self._at.is_training:
            raise LoopMisused(
                "run.prepare: the run has trained already; it has one loop. To train again with "
                "other values, start a run for each, as in ElasticTrainer(train, "
                'recipe_config={"lr": lr}).fit()'
            )
        if plan is not None or tp_divides is not None or experts:
            num_models = sum(isinstance(item, nn.Module) for item in objects)
            self._plans.add(plan or {}, tp_divides, experts, len(self._models), num_models)
        self._sequence |= sequence or {}
        prepared = tuple(self._objects.take(item) for item in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def draw(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Train on what a function draws, in place of a loader, before the loop.

        Each call, `function(*arguments)`, returns a microbatch; of a generator function it yields
        one after the other, and it is called again where it ends. The random generators of torch,
        Python and NumPy have a seed of their own for each, so that all workers draw what one
        would. Raises `LoopMisused` for a function that has another state.
        """
        self._objects.draw(function, arguments)

    def keep(self, *objects: Any, names: Sequence[str] = ()) -> Any:
        """Make objects that the script itself changes part of the run's state, before the loop.

        They are tensors changed in place, dictionaries of tensors and numbers, modules such as
        averaged weights, or other objects with `state_dict` and `load_state_dict`. With `names`
        only these attributes of any object are kept, or these items of a dictionary. A worker that
        joins and a resumed run have their values, and what a step that fails has changed is
        undone. Their shapes do not change, and all workers change them alike: between two steps,
        by what is the same on all. Returns the objects. Raises `LoopMisused` for others.
        """
        for item in objects:
            if any(item is model for model in self._models.declared):
                raise LoopMisused("run.keep: this model is prepared, which keeps it")
            self._kept.add(NamedValues(item, names) if names else item)
        return objects[0] if len(objects) == 1 else objects

    def state(self, first: Tensor) -> CarriedTensor:
        """Declare a tensor that each microbatch passes on to the same one of the next step.

        Such as the hidden state of a recurrent network, before the loop. `first` is its value at
        the first step, for one microbatch. Within `step.batches()` read and set the `value` of
        what this returns. It is part of the run's state, with any number of workers, and what a
        step that fails has set is dropped. Raises `LoopMisused` for what is no tensor.
        """
        return self._states.add(first)

    def evaluation(
        self,
        dataset: Dataset,
        losses: Callable[[nn.Module, Any], Any],
        **metrics: Callable[[nn.Module, Any], Any],
    ) -> None:
        """Declare held-out samples, which the run evaluates every `eval_every` steps.

        `losses(model, batch)` is the mean loss over a microbatch; each metric is a mean likewise.
        """
        self._evaluation = EvaluationSetup(dataset, losses, metrics)

    def evaluate(self) -> dict[str, float]:
        """The loss and the metrics of the held-out samples now, between two steps.

        The keys are "loss" and the names of the metrics. All workers must call it.
        """
        if self._evaluation is None:
            raise LoopMisused("run.evaluate: declare the samples with run.evaluation first")
        if self._at.moment is not Moment.BETWEEN_STEPS:
            raise LoopMisused("run.evaluate: call it in the loop, before or after `with step:`")
        self._at.before_evaluation()
        evaluation = self._evaluate()
        loss = math.nan if evaluation.loss is None else evaluation.loss
        return {"loss": loss, **evaluation.metrics}

    def steps(
        self,
        num_steps: int,
        microbatches: int = 8,
        max_grad_norm: float | None = None,
        updates_per_batch: int = 1,
        max_grad_value: float | None = None,
        split_batches: bool = False,
    ) -> Iterator[Step]:
        """The remaining steps of `num_steps`, counted from 1; compute each within `with step:`.

        A step's gradient is the mean over `microbatches` microbatches, whatever the number of
        workers. Each has the loader's `batch_size`; with `split_batches` all have it together, as
        parts of one batch of the loader. The gradient's norm is clipped to `max_grad_norm`, and
        its elements to `max_grad_value` in both directions. `updates_per_batch` steps in a row
        train on the same batch; `step.update` counts them from 0. A `break` ends the run with the
        last committed step. Code below the loop runs on the first worker.
        """
        counts = StepCounts(num_steps, microbatches, updates_per_batch)
        clipping = _clipping(max_grad_norm, max_grad_value)
        if split_batches:
            self._objects.split(microbatches)
        return self._begin(self._declared(counts, clipping, caller_of(currentframe())))

    def epochs(
        self,
        num_epochs: int,
        microbatches: int = 8,
        max_grad_norm: float | None = None,
        updates_per_batch: int = 1,
        max_grad_value: float | None = None,
        first: int = 0,
        steps_per_epoch: int | None = None,
        split_batches: bool = False,
    ) -> Iterator[tuple[int, EpochSteps]]:
        """The remaining of `num_epochs` epochs: their numbers, counted from `first`, and their
        steps, as in `for epoch, steps in run.epochs(10):`. Else as `steps`.

        An epoch consists of the whole steps of the loader's data, or of `steps_per_epoch`. Raises
        `LoopMisused` if neither is known.
        """
        refuse_counts(num_epochs=num_epochs)
        size = self._objects.begin_epochs(microbatches, split_batches, steps_per_epoch)
        size *= 1 if steps_per_epoch else updates_per_batch
        counts = StepCounts(num_epochs * size, microbatches, updates_per_batch)
        clipping = _clipping(max_grad_norm, max_grad_value)
        declared = self._declared(counts, clipping, caller_of(currentframe()))
        return self._epochs(declared, size, num_epochs, first)

    def range(
        self,
        first: int,
        stop: int | None = None,
        *,
        microbatches: int | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        reduction: Reduction = "mean",
    ) -> Iterator[int]:
        """The remaining epochs of `range(first, stop)`, in each of which the script's own loop over
        its prepared loader trains, as in `for images, labels in loader:`.

        Each iteration of that loop is a step: the batch is this worker's part of a batch of the
        loader, and `optimizer.step()` ends it. Behind that the tensor of the loss holds the mean
        over the whole batch. The batch is dealt to the workers in `microbatches` parts, by default
        the largest divisor of its size up to 32, or up to 8 for a model with BatchNorm, which
        normalizes each part. `reduction` is that of the loss over its samples, as in torch's loss
        functions. An epoch consists of the whole steps of the loader's data. Else as `steps`.
        """
        first, num_epochs = (0, first) if stop is None else (first, stop - first)
        if microbatches is None:
            source = self._objects.source
            models = self._models.declared
            microbatches = parts_of_batch(source.microbatch, models) if source else 1
        refuse_counts(num_epochs=num_epochs)
        size = self._objects.begin_epochs(microbatches, is_split=True)
        counts = StepCounts(num_epochs * size, microbatches, updates_per_batch=1)
        clipping = _clipping(max_grad_norm, max_grad_value)
        declared = self._declared(counts, clipping, caller_of(currentframe()))
        declared = in_one_pass(declared, reduction)
        return self._objects.loop.follow(self._epochs(declared, size, num_epochs, first))

    @property
    def is_first_worker(self) -> bool:
        """True on exactly one worker, as `step.is_first_worker`. Raises `LoopMisused` in front of
        the loop, which each process runs that takes part."""
        if self._at.is_early:
            raise LoopMisused(
                "run.is_first_worker: in front of the loop no worker is the first yet, and the "
                "command runs that code, too: write a file in the loop, at `step.number == 1`"
            )
        return self._at.is_first_worker

    @property
    def step(self) -> Step:
        """The present step, or the one behind which the script is. Raises `LoopMisused` in front
        of the first."""
        step = self._at.step or self._at.behind
        if not isinstance(step, Step):
            raise LoopMisused("run.step: no step has begun: use it in the loop, behind a batch")
        return step

    def stop(self) -> None:
        """End the run with the present step, as completed. All workers must call it."""
        self._at.is_stopped = True

    def print(self, *values: Any, **keywords: Any) -> None:
        """Print as Python's `print` does, but once: in the loop on one worker, see `elastic logs`,
        and in front of it in the command; between two steps nothing that has been printed before
        the second came again. It may take its place, as in `builtins.print = run.print`."""
        at, step = self._at, self._at.behind
        is_again = at.is_again if step is None else not step.committed
        is_repeated = at.moment is Moment.BETWEEN_STEPS and is_again
        is_here = self._prints_early if at.is_early else at.is_first_worker or not at.is_own
        if is_here and not is_repeated:
            _print(*values, **{"flush": True, **keywords})

    def _epochs(
        self, declared: Declaration, size: int, num_epochs: int, first: int
    ) -> Iterator[tuple[int, EpochSteps]]:
        declared = replace(declared, has_epochs=True)
        steps, begin = self._begin(declared), declared.begin_in_epoch
        return epochs_of(steps, size, num_epochs, first, self.stop, begin)

    def _declared(
        self, counts: StepCounts, clipping: Clipping, script: FrameType | None
    ) -> Declaration:
        refuse_counts(**vars(counts))
        objects = self._objects
        models, optimizers, source = self._models.declared, objects.optimizers, objects.source
        if not models or not optimizers or source is None:
            kinds = {"model": models or None, "optimizer": optimizers or None, "loader": source}
            missing = [kind for kind, item in kinds.items() if item is None]
            raise LoopMisused(f"run.steps: pass run.prepare the {' and the '.join(missing)} first")
        source = source.of_steps(source.microbatch * counts.microbatches)
        self._states.refuse_other_order(source.dataset)
        if self._sequence and self._states.states:
            raise LoopMisused(
                "run.state: with a `sequence` each worker of cp would have its own: drop one of "
                "them"
            )
        for rows in self._states.begin(counts.microbatches):
            self._kept.add(rows)
        self._kept.refuse_shared(models)
        names = {parameter: name for name, parameter in joined(models).named_parameters()}
        numbers = ModuleNumbers(models)
        objects.factory = ScriptOptimizerFactory(
            optimizers, objects.schedulers, names, clipping, objects.scaler, self._kept, numbers
        )
        return Declaration(
            self._models,
            objects.factory,
            source,
            counts,
            CarriedState(script, self._known(), self._kept.objects),
            self._states,
            ScriptVariables(script, self._known()),
            self._evaluation,
            *self._plans.joined(len(models)),
            self._sequence,
            self._plans.experts(len(models)),
        )

    def _known(self) -> Iterator[Any]:
        """The models, and their parts and tensors."""
        for model in self._models.declared:
            yield from model.modules()
            yield from model.parameters()
            yield from model.buffers()


def _clipping(max_norm: float | None, max_value: float | None) -> Clipping:
    try:
        return Clipping(max_norm, max_value)
    except UserError as error:
        raise LoopMisused(f"run.steps: {error}") from None
