"""A run's `statistics.jsonl`: what replicas tell of the inside of their model."""

from __future__ import annotations

from actors.file_names import STATISTICS
from actors.line_writers import Lines, open_lines
from actors.lines import LineLog
from actors.program import Replica
from actors.storage import Storage
from elastic.votes import StepRecord

PATIENCE_S = 2.0
"""Of a worker that ends or is aborted, with a storage that takes nothing."""


class StatisticsLog:
    """As one worker sees it: its world rank 0 writes, in another generation perhaps another."""

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._lines: Lines | None = None

    def tell(self, replica: Replica, record: StepRecord, world_rank: int) -> None:
        """The line of a step just committed, if it is due. Called on all ranks."""
        groups = replica.statistics()
        if groups is None or world_rank != 0:
            return
        if self._lines is None:
            self._lines = open_lines(LineLog(self._run, STATISTICS), record.generation)
        told = {"time": record.time, "step": record.step, "generation": record.generation}
        self._lines.write({**told, "groups": groups})

    def close(self) -> None:
        """Another may write from now on."""
        if self._lines is not None:
            self._lines.close(PATIENCE_S)
            self._lines = None
