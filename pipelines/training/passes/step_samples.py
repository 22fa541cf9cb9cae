"""The samples of a rank's steps, and its batches, of which the next one may be read early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pipelines.settings import TrainSettings
from pipelines.training.workload.data_shard import Rounds, draw_steps, microbatches_in
from pipelines.training.workload.workload import SeededSamples, Workload

ENDLESS = 2**62
"""A step that no run reaches."""


class _StepKey(NamedTuple):
    step: int
    rounds: Rounds
    skipped_batches: Sequence[int]


class StepSamples:
    """Draws samples and reads batches for one rank under one assignment."""

    def __init__(self, workload: Workload, settings: TrainSettings) -> None:
        self._workload = workload
        self._settings = settings
        self._key = _StepKey(0, (), ())
        self._samples: dict[int, SeededSamples] = {}
        self._coming: Iterator[dict[int, SeededSamples]] = iter(())
        self._early: tuple[list[SeededSamples], Any] | None = None
        """What has been read for the next pass."""

    def draw(self, step: int, rounds: Rounds, skipped_batches: Sequence[int]) -> None:
        """Make this the step whose passes are read."""
        key = _StepKey(step, rounds, skipped_batches)
        if key == self._key:
            return
        if key != self._key._replace(step=self._key.step + 1):
            own, num_samples = microbatches_in(rounds), self._workload.num_samples
            steps = range(step, ENDLESS)
            self._coming = draw_steps(self._settings, num_samples, steps, own, skipped_batches)
        self._samples = next(self._coming)
        self._key = key

    def parts(self, microbatches: Sequence[int]) -> list[SeededSamples]:
        """The samples of a pass of the step that was drawn."""
        return [self._samples[microbatch] for microbatch in microbatches]

    def read_early(self) -> None:
        """Read the first pass of the next step, while this step's vote is under way.

        The microbatches of a rank are the same in each step of a generation, except after the
        first. An error is that of the next step: it is raised when the pass is read again there.
        """
        key, workload = self._key, self._workload
        is_last = key.step >= self._settings.steps
        if is_last or workload.is_far or workload.has_readers or not any(key.rounds):
            return
        self.draw(key.step + 1, key.rounds, key.skipped_batches)
        parts = self.parts(key.rounds[0])
        try:
            self._early = parts, workload.read_pass(parts) if parts else None
        except Exception:
            self._early = None

    def read(self, parts: list[SeededSamples], interrupt: Callable[[], None]) -> Any:
        """The batch of a pass."""
        early, self._early = self._early, None
        if early is not None and early[0] == parts:
            return early[1]
        return self._workload.read_pass(parts, interrupt)
