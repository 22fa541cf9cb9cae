"""Prefetch of the samples that a rank will read in the next steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipelines.settings import TrainSettings
from pipelines.training.workload.data_shard import (
    DataShard,
    Rounds,
    draw_steps,
    microbatches_in,
)
from pipelines.training.workload.workload import SeededSamples, Workload, samples_in


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
        steps = range(step, self._settings.steps + 1)
        drawn_steps = self._draw(steps, microbatches_in(rounds), skipped_batches)
        for number, drawn in zip(steps, drawn_steps, strict=True):
            if number not in (step, self._settings.first_of_batch(number)):
                continue  # the workload keeps what is read again
            for microbatches in filter(None, rounds):
                yield [drawn[number] for number in microbatches]

    def _draw(
        self, steps: range, microbatches: Sequence[int], skipped_batches: Sequence[int]
    ) -> Iterator[dict[int, SeededSamples]]:
        num_samples = self._workload.num_samples
        return draw_steps(self._settings, num_samples, steps, microbatches, skipped_batches)

    def _training_samples(self, step: int, skipped_batches: Sequence[int]) -> list[int]:
        own = self._data_shard.own(self._settings.num_microbatches)
        [drawn] = self._draw(range(step, step + 1), own, skipped_batches)
        return samples_in(list(drawn.values()))

    def _held_out_samples(self) -> list[int]:
        settings, size = self._settings, self._settings.microbatch
        num_samples = settings.num_evaluated(self._workload.num_held_out)
        own = self._data_shard.even.own(-(-num_samples // size)) if num_samples else ()
        return [i for m in own for i in range(m * size, min((m + 1) * size, num_samples))]
