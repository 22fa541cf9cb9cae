"""A script's own loop over its prepared loader, each of whose iterations is a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import nn

from pipelines.loop.prepared.script_moment import ScriptMoment
from pipelines.loop.state.errors import LoopMisused

NORMALIZING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
MOST_PARTS, MOST_NORMALIZED = 32, 8
"""So many parts of a batch are dealt to the workers by default, at most; fewer where each part is
normalized by its own statistics."""


class OpenedStep(Protocol):
    number: int
    is_over: bool

    @property
    def is_reading(self) -> bool: ...

    def open(self) -> Any: ...

    def close(self) -> None: ...

    def note(self, error: BaseException) -> None: ...


class StepsOfEpoch(Protocol):
    def __iter__(self) -> Iterator[OpenedStep]: ...

    def __len__(self) -> int: ...


class LoaderLoop:
    """The steps that the next iteration over the loader takes.

    Such a step begins when the loop reads a batch, which is this worker's part of the step, and
    ends when the script has stepped its optimizers.
    """

    def __init__(self, at: ScriptMoment) -> None:
        self._at = at
        self._steps: StepsOfEpoch | None = None
        self.num_steps: int | None = None
        """The steps of an epoch; None: the script loops over the run's steps instead."""

    @property
    def is_due(self) -> bool:
        """Whether the steps of the present epoch have not begun."""
        return self._steps is not None

    def follow(self, epochs: Iterator[tuple[int, StepsOfEpoch]]) -> Iterator[int]:
        """The numbers of the epochs, each of which the next iteration over the loader trains."""
        for number, steps in epochs:
            self._steps, self.num_steps = steps, len(steps)
            yield number
            if self.is_due:
                raise LoopMisused(
                    f"epoch {number}: its loop over the loader has not run: loop over the loader "
                    "that run.prepare returns, in each epoch of run.range"
                )

    def batches(self) -> Iterator[Any]:
        """This worker's part of each step of the present epoch."""
        steps, self._steps = self._steps, None
        assert steps is not None, "no epoch has begun"
        for step in steps:
            batch = step.open()
            if step.is_over:
                continue  # it could not be read, and comes again
            yield batch
            if not (step.is_over or step.is_reading or self._at.is_stepped):
                step.note(_unstepped(step.number))
            step.close()


def parts_of_batch(batch_size: int, models: Iterable[nn.Module]) -> int:
    """The number of equal parts of a batch that are dealt to the workers: so many that most numbers
    of workers divide them nearly evenly."""
    is_normalized = any(
        isinstance(part, NORMALIZING) for model in models for part in model.modules()
    )
    most = MOST_NORMALIZED if is_normalized else MOST_PARTS
    divisors = (n for n in range(most, 1, -1) if batch_size % n == 0)
    return next(divisors, 1 if is_normalized else batch_size)


def _unstepped(number: int) -> LoopMisused:
    return LoopMisused(
        f"step {number}: the loop over the loader reads a batch before optimizer.step(), of the "
        "optimizer that run.prepare returns: each iteration is a step; to accumulate gradients "
        "over several, loop over run.epochs(..., microbatches=N), with `with step:` and "
        "step.batches()"
    )
