"""The `step` object of a custom training loop: its microbatches and backward passes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from traceback import clear_frames
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipelines.loop.prepared.honoured_calls import run_backward, set_entered
from pipelines.loop.prepared.script_moment import ScriptMoment
from pipelines.loop.reports import Reported
from pipelines.loop.state.errors import LoopMisused, explained
from pipelines.training.workload.clipping import Clipping
from pipelines.training.workload.workload import LossSums, at_least_float32


class Microbatch(Protocol):
    """The data of one pass.

    `num_samples` is 0 for a padding microbatch, which keeps this worker's collectives in pace with
    workers that have more microbatches. Its samples are real, but do not count.
    """

    @property
    def value(self) -> Any: ...

    @property
    def num_samples(self) -> int: ...


class Engine(Protocol):
    """The run's work around the passes of one step."""

    num_microbatches: int
    """The number of this worker's microbatches, padding included."""

    def next(self) -> Microbatch:
        """Begin the next pass and return its microbatch; the forward must follow directly."""

    def forwarded(self, count: Tensor) -> None:
        """End a forward pass, whose loss is the mean of `count` losses."""

    def called(self) -> None:
        """The model was called: a call, and its backward pass, may update buffers."""

    def all_backwarded(self) -> None:
        """The body is over, after all passes. Raises `LoopMisused` for what it has changed."""

    def left(self) -> None:
        """The body is over, maybe by an exception in a pass."""


class Position(NamedTuple):
    """Where a step is in the data: how often these were read completely before it, and its number
    among the steps of its batch."""

    epoch: int = 0
    update: int = 0


class Step:
    """One step; its computation goes into a block `with step:`.

    The block ends when the step has committed or failed. If a worker fails, the block ends without
    an exception, and after the recovery the loop gets the same step again. An exception of the
    script ends the run with its traceback.
    """

    def __init__(
        self, number: int, at: ScriptMoment, position: Position, seed: Callable[[int, str], None]
    ) -> None:
        """`seed` seeds the random generators for a moment of the step with this number."""
        self.number = number
        """Counted from 1."""
        self.position = position
        self.index = number - 1
        """Counted from 0: of `run.epochs` in its epoch, else from the run's beginning."""
        self.committed = False
        """Whether the step committed, known after the block; if not, the same step follows."""
        self.loss = math.nan
        """The mean loss over all workers, known after the block if the step has committed; before
        that it is the loss of the latest step that has, so that code which judges by it does what
        it did before."""
        self.grad_norm = math.nan
        """The norm of its gradient before it was clipped, known likewise."""
        self.on_enter: Callable[[], Engine] = _not_begun
        self.on_finish: Callable[[list[LossSums] | BaseException], bool] = _ignore
        self.gather_reports: Callable[[], dict[str, float | None]] = dict
        self.reports: Mapping[str, float | None] = _no_reports()
        """Those of the latest step whose reports were read."""
        self._at = at
        self._seed = seed
        self._engine: Engine | None = None
        self._open: Microbatch | None = None
        self._sums: list[LossSums] = []
        self._failure: BaseException | None = None
        self.own_reports = Reported()
        self._num_samples: int | None = None
        """Of the present microbatch."""
        self._is_entered = self.is_over = False
        self._reading: Iterator[Any] | None = None
        """The microbatches of a step that `open` has entered."""
        self.summed_samples: int | None = None
        """Where a loss is the sum over its samples: those of the whole step."""

    @property
    def epoch(self) -> int:
        """How often the data were read completely before this step."""
        return self.position.epoch

    @property
    def update(self) -> int:
        """The number of this step among those of its batch, counted from 0."""
        return self.position.update

    @property
    def num_samples(self) -> int:
        """How many samples of the present microbatch count: 0 if it pads the step of a worker with
        fewer microbatches than others. Raises `LoopMisused` outside of `step.batches()`."""
        if self._num_samples is None:
            raise self.misused("`step.num_samples` is of a microbatch: use it in `step.batches()`")
        return self._num_samples

    @property
    def is_first_worker(self) -> bool:
        """True on exactly one worker, for output that should appear once."""
        return self._at.is_first_worker

    def follow(self, before: Step) -> None:
        """Until this step has committed, show what is known of the one before."""
        self.loss, self.grad_norm, self.reports = before.loss, before.grad_norm, before.reports

    @property
    def is_reading(self) -> bool:
        """Whether microbatches remain without a backward pass."""
        if self._engine is None or self.goes_on:
            return False
        return len(self._sums) < self._engine.num_microbatches

    @property
    def goes_on(self) -> bool:
        """Whether the body runs on though it has failed: in a loop over the loader."""
        return self._reading is not None and self._failure is not None

    def open(self) -> Any:
        """Enter the step without `with step:`, and return its only microbatch. If that cannot be
        read, the step is over."""
        self.__enter__()
        self._reading = self.batches()
        try:
            return next(self._reading)
        except Exception as error:
            self.__exit__(type(error), error, error.__traceback__)

    def close(self) -> None:
        """Leave a step that `open` has entered, unless it is over."""
        if self._reading is None or self.is_over:
            return
        try:
            next(self._reading, None)
        except Exception as error:
            self.note(error)
        self.__exit__(None, None, None)

    def is_left_committed(self) -> bool:
        """Whether the step has committed with which the script leaves its loop."""
        self.close()
        return self.committed

    def __enter__(self) -> Step:
        self._is_entered = True
        self._engine = self.on_enter()
        self._at.enter(self)
        set_entered(self)
        self.seed_draws("in the body")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        set_entered(None)
        if self._engine is not None:
            self._engine.left()
        if error is not None and not isinstance(error, Exception):
            return False  # ends the script
        if error is not None:
            self.note(error)
            clear_frames(trace)  # the frames hold memory that the run is about to free
        if self._failure is None:
            self._failure = self._mistake()
        self._finish()
        return True

    def batches(self) -> Iterator[Any]:
        """This worker's microbatches of the step; call `backward` once for each."""
        engine = self._entered()
        if self._sums:
            raise self.misused(
                "`step.batches()` is iterated twice; compute the whole loss of a microbatch at "
                "once, or, for several updates from the same batch, pass run.steps "
                "updates_per_batch=2 and choose by step.update"
            )
        for _ in range(engine.num_microbatches):
            self._check_closed()
            try:
                microbatch = engine.next()
            except BaseException as error:
                self.note(error)
                raise
            self._open, self._num_samples = microbatch, microbatch.num_samples
            self._at.forget_loss()
            yield microbatch.value
        self._num_samples = None
        self._check_closed()
        self.seed_draws("behind the microbatches")

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Run the backward pass of the mean loss over the microbatch, as `loss.backward()` does.

        `weight` is the number of losses in the mean, if these are not the samples, e.g. tokens
        of which some are masked. A step's gradient is that of the mean over all its microbatches,
        whatever the number of workers.
        """
        engine = self._entered()
        microbatch, self._open = self._open, None
        if microbatch is None:
            raise self.misused(
                "call `step.backward(loss)`, or `loss.backward()`, once for each of "
                "`step.batches()`, with the sum of the losses; that of other tensors than the "
                "model's names them, as in loss.backward(inputs=[noise]); for several updates from "
                "the same batch see updates_per_batch of run.steps"
            )
        self._at.take_loss(loss)
        if self.goes_on:
            return
        self._check_loss(loss)
        if self.summed_samples and weight is None:
            loss = loss * (self.summed_samples / max(1, microbatch.num_samples))
        weight = microbatch.num_samples if weight is None else weight
        count = torch.as_tensor(weight if microbatch.num_samples else 0, device=loss.device)
        count = count.detach().reshape(())
        try:
            engine.forwarded(count)
            total = at_least_float32(loss.reshape(())) * count
            run_backward(total)
            engine.called()
        except BaseException as error:
            self.note(error)
            if self._reading is not None and isinstance(error, Exception):
                return  # the step comes again
            raise
        self._sums.append(LossSums(total.detach(), count))

    def clip(self, model: nn.Module, clipping: Clipping) -> Tensor:
        """Clip the gradients of the whole step. Returns a tensor that then holds their norm."""
        return self._at.clip(model, clipping)

    def note_read(self, tensor: Tensor) -> None:
        """The script looks at the number in a tensor, which may be its loss."""
        if self._reading is not None:
            self._at.note_read(tensor)

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, Tensor):
            raise self.misused(
                f"`step.backward(loss)` got {type(loss).__name__}: pass the loss itself, a tensor"
            )
        if loss.numel() != 1:
            raise self.misused(f"a loss of shape {tuple(loss.shape)}: pass its mean, one number")
        if not loss.requires_grad:
            raise self.misused(
                "a loss without a gradient: compute it with the prepared model, outside "
                "torch.no_grad() and without detach()"
            )

    def report(self, **values: Any) -> None:
        """Log numbers with this step, in the metrics, MLflow, the display and the result.

        A number, or a tensor of one element, is averaged: over the samples where it is reported
        within `step.batches()`, elsewhere over the workers that report it. Of a pair (sum, count)
        the quotient of the totals is logged, of which one reported within `step.batches()` does
        not count where it is of a padding microbatch; see `num_samples`. Call it in the block, or
        behind it before the next step. A step during which a worker dies may lack its numbers.
        """
        weight = 1.0 if self._num_samples is None else float(self._num_samples)
        for name, value in values.items():
            try:
                self.own_reports.add(name, value, weight)
            except LoopMisused as error:
                self.note(error)
                raise

    @property
    def reported(self) -> Mapping[str, float | None]:
        """What all workers have reported with this step so far, averaged as `report` says.

        Read it behind the block, on all workers or on one. If the step has not committed, they are
        those of an earlier step, or NaN. Raises `LoopMisused` in the block.
        """
        if not self.is_over:
            raise self.misused(
                "`step.reported` is what all workers have reported: read it behind `with step:`"
            )
        if self.committed:
            self.reports = _no_reports() | self.gather_reports()
        return self.reports

    def seed_draws(self, moment: str, number: int | None = None) -> None:
        """Seed the generators of Python, NumPy and torch for what the script draws next outside of
        the microbatches: the same on each worker, and again when the step comes again. `number` is
        that of another step than this one."""
        self._seed(self.number if number is None else number, moment)

    def note(self, error: BaseException) -> None:
        """Record an error: the step cannot commit, even if the script suppresses the error."""
        if self._failure is None:
            self._failure = explained(error, f"step {self.number}")

    def note_call(self) -> None:
        """A model was called: what has changed in its buffers was changed by that pass."""
        if self._engine is not None:
            self._engine.called()

    def ensure_finished(self) -> None:
        """Finish the step when the loop requests another; an error if it was never entered."""
        self.close()
        if not self._is_entered:
            self._failure = LoopMisused(
                f"step {self.number} was never entered: write `with step:` in the loop's body"
            )
        if not self.is_over:
            self._finish()

    def _finish(self) -> None:
        self.is_over = True
        self._at.leave()
        failure, self._failure = self._failure, None
        sums, self._sums = self._sums, []
        self.committed = self.on_finish(sums if failure is None else failure)
        self._at.show(self.loss, self.grad_norm)

    def _mistake(self) -> LoopMisused | None:
        """What is wrong with a body that has ended without an error."""
        if self._open is not None:
            return self._without_backward()
        engine = self._entered()
        expected = engine.num_microbatches
        if missing := expected - len(self._sums):
            return self.misused(
                f"{missing} of this worker's {expected} microbatches were not read: read all of "
                "`step.batches()`, without `break`"
            )
        try:
            engine.all_backwarded()
        except LoopMisused as error:
            return error
        return None

    def _entered(self) -> Engine:
        if self._engine is None:
            raise self.misused("its microbatches exist only within `with step:`")
        return self._engine

    def _check_closed(self) -> None:
        if self._open is not None:
            raise self._without_backward(", before the next")

    def _without_backward(self, when: str = "") -> LoopMisused:
        return self.misused(
            f"a microbatch got no `step.backward(loss)`, or `loss.backward()`{when}: call one of "
            "them once for each"
        )

    def misused(self, how: str) -> LoopMisused:
        """An error of the script in this step, which cannot commit."""
        error = LoopMisused(f"step {self.number}: {how}")
        self.note(error)
        return error


def _no_reports() -> defaultdict[str, float | None]:
    return defaultdict(lambda: math.nan)


def _not_begun() -> Engine:
    raise LoopMisused("a step that `run.steps` has not returned")


def _ignore(outcome: list[LossSums] | BaseException) -> bool:
    """No thread waits for the outcome."""
    return False
