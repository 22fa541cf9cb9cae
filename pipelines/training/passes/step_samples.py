"""The samples of a rank's steps, and its batches, of which the next one may be read early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from elastic.geometry.sample_order import microbatch_seed
from pipelines.settings import TrainSettings
from pipelines.training.workload.data_shard import microbatch_sample_ids
from pipelines.training.workload.sample_order import samples_of
from pipelines.training.workload.workload import SeededSamples, Workload

Rounds = Sequence[tuple[int, ...]]
"""The microbatches of each of a rank's passes in a step."""


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
        self._samples: dict[int, Sequence[int]] = {}
        self._early: tuple[list[SeededSamples], Any] | None = None
        """What has been read for the next pass."""

    def draw(self, step: int, rounds: Rounds, skipped_batches: Sequence[int]) -> None:
        """Make this the step whose passes are read."""
        key = _StepKey(step, rounds, skipped_batches)
        if key == self._key:
            return
        ids = self.ids(*key)
        samples = samples_of(self._settings.seed, ids, self._workload.num_samples)
        size = self._settings.microbatch
        own = _microbatches(rounds)
        self._samples = {m: samples[i * size : (i + 1) * size] for i, m in enumerate(own)}
        self._key = key

    def ids(self, step: int, rounds: Rounds, skipped_batches: Sequence[int]) -> list[int]:
        """The ids of this rank's samples of a step."""
        return [
            sample_id
            for microbatch in _microbatches(rounds)
            for sample_id in microbatch_sample_ids(
                self._settings, step, microbatch, skipped_batches
            )
        ]

    def parts(self, microbatches: Sequence[int]) -> list[SeededSamples]:
        """The samples of a pass of the step that was drawn."""
        seed, step = self._settings.seed, self._key.step
        return [
            SeededSamples(microbatch_seed(seed, step, number), self._samples[number])
            for number in microbatches
        ]

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


def _microbatches(rounds: Rounds) -> list[int]:
    return [microbatch for microbatches in rounds for microbatch in microbatches]
