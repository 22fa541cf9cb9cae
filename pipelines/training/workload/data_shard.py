"""Which microbatches of a batch one data rank computes, padded to equal rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.runtime.program import Groups
from elastic.geometry.sample_order import batch_ids, deal, num_rounds
from pipelines.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class DataShard:
    """One data rank's place among all that read different samples."""

    data_rank: int
    num_data_ranks: int

    @classmethod
    def of(cls, groups: Groups) -> DataShard:
        layout = groups.assignment.layout
        return cls(layout.data_rank(groups.world_rank), layout.num_data_ranks)

    def rounds(self, num_microbatches: int, num_run: Callable[[int], int]) -> list[int | None]:
        """The microbatch of each round. None is an empty one: every data rank runs as many
        rounds, so that the collectives of forward and backward match.

        `num_run` says how many are run where at least so many are needed.
        """
        own = deal(num_microbatches, self.num_data_ranks)[self.data_rank]
        padding = num_run(num_rounds(num_microbatches, self.num_data_ranks)) - len(own)
        return [*own, *[None] * padding]


def ids_of(
    settings: TrainSettings, step: int, microbatch: int, skipped_batches: Sequence[int] = ()
) -> range:
    """The ids of the samples of one microbatch of a step."""
    size, ids = settings.microbatch, batch_ids(step, settings.batch, skipped_batches)
    return ids[microbatch * size : (microbatch + 1) * size]
