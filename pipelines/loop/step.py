"""One step as the body of the user's loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from traceback import clear_frames
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from pipelines.loop.errors import LoopMisused
from pipelines.training.workload.workload import Sums, at_least_float32


class Microbatch(Protocol):
    """What the body computes with at once.

    `num_samples` is 0 for one that only keeps this worker in pace with those that have more: its
    samples are real, and count for nothing.
    """

    @property
    def value(self) -> Any: ...

    @property
    def num_samples(self) -> int: ...


class Engine(Protocol):
    """What goes on around the passes of one step."""

    num_microbatches: int
    """Of this worker, those included that count for nothing."""

    def next(self) -> Microbatch:
        """What the next pass is for; nothing else comes between this and its forward."""

    def forwarded(self, count: Tensor) -> None:
        """A forward pass is over, of so many losses."""


class Step:
    """`with step:` around what is computed for it.

    The block ends when the step is decided. A failure inside, of this machine or of another, ends
    it without an error: the loop is handed the same step again once the run has recovered. An
    error of the script's own ends the run, with its traceback.
    """

    def __init__(
        self,
        number: int,
        engine: Engine,
        epoch: int = 0,
        is_first_worker: bool = True,
    ) -> None:
        self.number = number
        """Counted from 1."""
        self.epoch = epoch
        """How often the data have been read before this step."""
        self.is_first_worker = is_first_worker
        """True on one worker of all, for what is to be told once."""
        self.committed = False
        """Whether it counts: known after the block. If not, the same step follows again."""
        self.begun: Callable[[], None] = _nothing
        self.finished: Callable[[list[Sums] | BaseException], None] = _nobody
        self._engine = engine
        self._open: Microbatch | None = None
        self._sums: list[Sums] = []
        self._failure: BaseException | None = None
        self._is_entered = self._is_over = False

    def __enter__(self) -> Step:
        self._is_entered = True
        self.begun()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False  # it ends the script
        if error is not None:
            self.note(error)
            clear_frames(trace)  # they hold what the run is about to give back
        if self._failure is None and (unread := self._unread()):
            self._failure = LoopMisused(f"step {self.number}: {unread}")
        self._finish()
        return True

    def batches(self) -> Iterator[Any]:
        """This worker's microbatches of the step, each to be followed by one `backward`."""
        for _ in range(self._engine.num_microbatches):
            self._see_that_it_is_closed()
            try:
                microbatch = self._engine.next()
            except BaseException as error:
                self.note(error)
                raise
            self._open = microbatch
            yield microbatch.value
        self._see_that_it_is_closed()

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """The backward pass of the mean loss over the microbatch.

        `weight` is how many losses it is the mean of, where these are not the samples, as with
        tokens some of which are masked. A step's gradient is that of the mean over all its
        microbatches, on whatever workers.
        """
        microbatch, self._open = self._open, None
        if microbatch is None:
            raise self._misused("`step.backward` comes once after each of `step.batches()`")
        if loss.numel() != 1:
            raise self._misused(f"a loss of shape {tuple(loss.shape)}: give its mean, one number")
        weight = microbatch.num_samples if weight is None else weight
        count = torch.as_tensor(weight if microbatch.num_samples else 0, device=loss.device)
        count = count.detach().reshape(())
        try:
            self._engine.forwarded(count)
            total = at_least_float32(loss.reshape(())) * count
            total.backward()
        except BaseException as error:
            self.note(error)
            raise
        self._sums.append(Sums(total.detach(), count))

    def note(self, error: BaseException) -> None:
        """The step cannot commit, even if the script goes on as if nothing had been."""
        if self._failure is None:
            self._failure = error

    def see_that_it_ran(self) -> None:
        """Called when the loop asks for another step."""
        if not self._is_entered:
            self._failure = LoopMisused(
                f"step {self.number} was never entered: write `with step:` in the loop's body"
            )
        if not self._is_over:
            self._finish()

    def _finish(self) -> None:
        self._is_over = True
        failure, self._failure = self._failure, None
        sums, self._sums = self._sums, []
        self.finished(sums if failure is None else failure)

    def _unread(self) -> str | None:
        if self._open is not None:
            return "a microbatch got no `step.backward(loss)`"
        wanted = self._engine.num_microbatches
        missing = wanted - len(self._sums)
        if missing:
            return (
                f"{missing} of this worker's {wanted} microbatches were left "
                "unread: read all of `step.batches()`, without `break` or `continue` of the block"
            )
        return None

    def _see_that_it_is_closed(self) -> None:
        if self._open is not None:
            raise self._misused(
                "a microbatch got no `step.backward(loss)` before the next was asked for"
            )

    def _misused(self, how: str) -> LoopMisused:
        error = LoopMisused(f"step {self.number}: {how}")
        self.note(error)
        return error


def _nothing() -> None:
    """Nothing is to be opened."""


def _nobody(outcome: list[Sums] | BaseException) -> None:
    """Nobody waits for it yet."""
