"""The microbatches of a batch that one data rank computes, padded to equal rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from actors.runtime.program import Groups
from elastic.geometry.sample_order import batch_ids, deal, microbatch_seed, num_rounds
from pipelines.settings import TrainSettings
from pipelines.training.workload.sample_order import samples_of
from pipelines.training.workload.workload import SeededSamples

NUM_DRAWN = 512
"""Samples are drawn for several steps at once: up to this number, a call costs about the same."""


@dataclass(frozen=True, slots=True)
class DataShard:
    """A data rank, and the number of data ranks, each of which reads different samples.

    `shares` are the numbers of microbatches of a step that the ranks compute; see `Assignment`.
    """

    data_rank: int
    num_data_ranks: int
    shares: tuple[int, ...] = ()

    @classmethod
    def of(cls, groups: Groups) -> DataShard:
        layout, shares = groups.assignment.layout, groups.assignment.shares
        return cls(layout.data_rank(groups.world_rank), layout.num_data_ranks, shares)

    @property
    def even(self) -> DataShard:
        """The same rank with even shares, by which held-out data are dealt."""
        return replace(self, shares=())

    def own(self, num_microbatches: int) -> tuple[int, ...]:
        """The microbatches of this rank."""
        return deal(num_microbatches, self.num_data_ranks, self.shares)[self.data_rank]

    def rounds(
        self, num_microbatches: int, round_up: Callable[[int], int], num_merged: int = 1
    ) -> list[tuple[int, ...]]:
        """The microbatches of each round, at most `num_merged`; an empty round has none.

        Every data rank runs the same number of rounds, so that the collectives of forward and
        backward match. `round_up` maps the least number of rounds to the number that is run.
        """
        own = self.own(num_microbatches)
        most = num_rounds(num_microbatches, self.num_data_ranks, self.shares)
        num_run = round_up(-(-most // num_merged))
        if not own:
            return [()] * num_run
        return [tuple(own[i] for i in chosen) for chosen in deal(len(own), num_run)]


Rounds = Sequence[tuple[int, ...]]
"""The microbatches of each of a rank's passes in a step."""


def microbatches_in(rounds: Rounds) -> list[int]:
    return [microbatch for microbatches in rounds for microbatch in microbatches]


def sample_ids(
    settings: TrainSettings, step: int, microbatches: Sequence[int], skipped_batches: Sequence[int]
) -> list[int]:
    """The sample ids of some microbatches of a step, in order."""
    return [
        sample_id
        for microbatch in microbatches
        for sample_id in microbatch_sample_ids(settings, step, microbatch, skipped_batches)
    ]


def draw_steps(
    settings: TrainSettings,
    num_samples: int,
    steps: range,
    microbatches: Sequence[int],
    skipped_batches: Sequence[int],
) -> Iterator[dict[int, SeededSamples]]:
    """The same microbatches of each of these steps: their samples, of `num_samples` in an epoch,
    and their seeds. Several steps are drawn at once, which is faster."""
    size = settings.microbatch
    num_steps = max(1, NUM_DRAWN // max(1, len(microbatches) * size))
    for begin in range(0, len(steps), num_steps):
        together = steps[begin : begin + num_steps]
        keys = [(step, microbatch) for step in together for microbatch in microbatches]
        ids = [i for key in keys for i in microbatch_sample_ids(settings, *key, skipped_batches)]
        samples = samples_of(settings.seed, ids, num_samples)
        drawn = {
            key: SeededSamples(
                microbatch_seed(settings.seed, *key),
                samples[i * size : (i + 1) * size],
                microbatch_seed(settings.seed, settings.first_of_batch(key[0]), key[1]),
            )
            for i, key in enumerate(keys)
        }
        for step in together:
            yield {microbatch: drawn[step, microbatch] for microbatch in microbatches}


def microbatch_sample_ids(
    settings: TrainSettings, step: int, microbatch: int, skipped_batches: Sequence[int] = ()
) -> range:
    """The sample ids of one microbatch of a step."""
    size = settings.microbatch
    ids = batch_ids(step, settings.batch, skipped_batches, settings.updates_per_batch)
    return ids[microbatch * size : (microbatch + 1) * size]
