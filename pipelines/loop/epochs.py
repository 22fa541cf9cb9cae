"""Epochs: the steps of a run, for scripts with a loop over epochs and one over batches in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref

from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.step import Step


class Epoch(int):
    """The number of an epoch, which is iterated over its steps once.

    A worker that joins, and a resumed run, begin with the present epoch, at its next step.
    """

    _latest: Step
    _steps: ref[Any]
    _size: int

    @classmethod
    def beginning_with(cls, step: Step, steps: Iterator[Step], size: int, first: int) -> Epoch:
        """`steps` goes on behind `step`; an epoch has `size`, and the `first` has this number."""
        epoch = cls(first + (step.number - 1) // size)
        epoch._latest, epoch._steps, epoch._size = step, ref(steps), size
        return epoch

    def __iter__(self) -> Iterator[Step]:
        step: Step | None = self._latest
        while step is not None:
            self._latest = step
            yield step
            # The iterator belongs to the loop over epochs, which closes it when it is left.
            steps = None if self.is_over else self._steps()
            step = None if steps is None else next(steps, None)
            del steps

    @property
    def is_over(self) -> bool:
        return self._latest.committed and self._latest.number % self._size == 0


def epochs_of(steps: Iterator[Step], size: int, first: int) -> Iterator[Epoch]:
    """The epochs of `size` steps each, counted from `first`. Raises `LoopMisused` for one that was
    not iterated to its end: the next step would not be the first of an epoch."""
    epoch = None
    for step in steps:
        if epoch is not None and not epoch.is_over:
            raise LoopMisused(
                f"epoch {epoch} was left before its last step: `for step in epoch:` runs over all "
                "steps of an epoch; to end the run, leave the loop over epochs, or call run.stop()"
            )
        epoch = Epoch.beginning_with(step, steps, size, first)
        yield epoch
