"""Epochs: the steps of a run, for scripts with a loop over epochs and one over batches in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import currentframe
from typing import Any
from weakref import ref

from pipelines.loop.state.counted_iterators import shift_counts
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.step import Step


class EpochSteps:
    """The steps of an epoch, iterated once; on a worker that joins, and in a resumed run, those
    that remain."""

    def __init__(
        self,
        number: int,
        step: Step,
        steps: Iterator[Step],
        size: int,
        begin: Callable[[bool], None],
    ) -> None:
        """`step` is the first, behind which `steps` goes on; a whole epoch has `size`. `begin` is
        called when the script reads the first, with whether it is the first of the epoch."""
        self._number = number
        self._begin = begin
        self._latest = step
        self._steps: ref[Any] = ref(steps)
        self._size = size
        self._is_begun = False

    def __iter__(self) -> Iterator[Step]:
        if self._is_begun:
            raise LoopMisused(f"epoch {self._number}: its steps are iterated twice")
        self._is_begun = True
        step: Step | None = self._latest
        index = self._index_of(self._latest)
        shift_counts(currentframe(), index)
        self._begin(index == 0)
        self._latest.seed_draws("before the body")
        while step is not None:
            self._latest = step
            step.index = self._index_of(step)
            yield step
            # The iterator belongs to the loop over epochs, which closes it when it is left.
            steps = None if self.is_over else self._steps()
            step = None if steps is None else next(steps, None)
            del steps

    def _index_of(self, step: Step) -> int:
        return (step.number - 1) % self._size

    def __len__(self) -> int:
        """The steps of the whole epoch."""
        return self._size

    @property
    def is_over(self) -> bool:
        return self._latest.committed and self._latest.number % self._size == 0


def epochs_of(
    steps: Iterator[Step],
    size: int,
    num_epochs: int,
    first: int,
    stop: Callable[[], None],
    begin: Callable[[bool], None],
) -> Iterator[tuple[int, EpochSteps]]:
    """The numbers of the epochs of `size` steps, counted from `first`, and their steps. What the
    script draws between these two is seeded by the first step of the epoch, on each worker.

    The last epoch may be left before its last step, which calls `stop`. Raises `LoopMisused` for
    another that was: the next step would not be the first of one.
    """
    epoch = None
    for step in steps:
        index = (step.number - 1) // size
        is_last = index == num_epochs - 1
        if epoch is not None and not (epoch.is_over or is_last):
            raise LoopMisused(
                f"epoch {first + index} was left before its last step: iterate over all of its "
                "steps; to end the run, leave the loop over epochs, or call run.stop()"
            )
        if epoch is None:
            shift_counts(currentframe(), index)
        epoch = EpochSteps(first + index, step, steps, size, begin)
        step.seed_draws("before the epoch", number=index * size + 1)
        yield first + index, epoch
        if is_last and not epoch.is_over:
            stop()
