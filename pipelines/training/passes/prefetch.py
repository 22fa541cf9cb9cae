"""Prefetch of the samples that a rank will read in the next steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elastic.geometry.sample_order import deal, microbatch_seed
from pipelines.settings import TrainSettings
from pipelines.training.workload.data_shard import DataShard, microbatch_sample_ids
from pipelines.training.workload.sample_order import samples_of
from pipelines.training.workload.workload import SeededSamples, Workload

Rounds = Sequence[tuple[int, ...]]
"""The microbatches of each of a rank's passes in a step."""


class SamplePrefetch:
    """Prefetches for one rank under one assignment; each step is requested once."""

    def __init__(self, workload: Workload, settings: TrainSettings, data_shard: DataShard) -> None:
        self._workload = workload
        self._settings = settings
        self._data_shard = data_shard
        self._last_step = 0
        self._plan: tuple[Rounds, Sequence[int]] | None = None
        """The rounds and skipped batches by which passes are read ahead."""

    def start(self, step: int, rounds: Rounds, skipped_batches: Sequence[int]) -> None:
        """Start to read the passes of this step and the next ones, whose rounds will be the same,
        and to fetch the samples of this step and of the next `cache.prefetch_steps`."""
        if self._plan != (rounds, skipped_batches):
            self._plan = rounds, skipped_batches
            self._workload.read_ahead(self._passes_from(step, rounds, skipped_batches))
        if not self._workload.is_far:
            return
        last = min(step + self._settings.cache.prefetch_steps, self._settings.steps)
        for coming in range(max(step, self._last_step + 1), last + 1):
            self._workload.prefetch(self._training_samples(coming, skipped_batches))
            every = self._settings.eval_every
            if every and coming % every == 0:
                self._workload.prefetch(self._held_out_samples(), held_out=True)
            self._last_step = coming

    def _passes_from(
        self, step: int, rounds: Rounds, skipped_batches: Sequence[int]
    ) -> Iterator[list[SeededSamples]]:
        for coming in range(step, self._settings.steps + 1):
            for microbatches in rounds:
                if microbatches:
                    yield [
                        self._seeded_samples(coming, number, skipped_batches)
                        for number in microbatches
                    ]

    def _seeded_samples(
        self, step: int, microbatch: int, skipped_batches: Sequence[int]
    ) -> SeededSamples:
        settings = self._settings
        ids = microbatch_sample_ids(settings, step, microbatch, skipped_batches)
        samples = samples_of(settings.seed, ids, self._workload.num_samples)
        return SeededSamples(microbatch_seed(settings.seed, step, microbatch), samples)

    def _own(self, num_microbatches: int) -> Sequence[int]:
        return deal(num_microbatches, self._data_shard.num_data_ranks)[self._data_shard.data_rank]

    def _training_samples(self, step: int, skipped_batches: Sequence[int]) -> list[int]:
        settings = self._settings
        ids = [
            sample_id
            for microbatch in self._own(settings.num_microbatches)
            for sample_id in microbatch_sample_ids(settings, step, microbatch, skipped_batches)
        ]
        return samples_of(settings.seed, ids, self._workload.num_samples)

    def _held_out_samples(self) -> list[int]:
        settings, size = self._settings, self._settings.microbatch
        num_samples = min(settings.eval_samples, self._workload.num_held_out)
        own = self._own(-(-num_samples // size)) if num_samples else ()
        return [i for m in own for i in range(m * size, min((m + 1) * size, num_samples))]
