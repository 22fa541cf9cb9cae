"""A run's `statistics.jsonl`: what replicas tell of the inside of their model."""

from __future__ import annotations

import sys
from contextlib import suppress

from actors.runtime.program import Replica
from actors.storage.file_names import STATISTICS
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import Lines, open_lines
from actors.storage.storage import Storage
from elastic.protocol.votes import StepRecord

PATIENCE_S = 2.0
"""Of a worker that ends or is aborted, with a storage that takes nothing."""


class StatisticsLog:
    """As one worker sees it: its world rank 0 writes, in another generation perhaps another.

    Training never ends, nor waits for an object store, because of this log: lines that storage does
    not take wait in memory.
    """

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._lines: Lines | None = None

    def tell(self, replica: Replica, record: StepRecord, world_rank: int) -> None:
        """The line of a step just committed, if it is due. Called on all ranks."""
        groups = replica.statistics()
        if groups is None or world_rank != 0:
            return
        if self._lines is None:
            log = LineLog(self._run, STATISTICS)
            self._lines = open_lines(log, record.generation, opens_later=True)
        told = {"time": record.time, "step": record.step, "generation": record.generation}
        self._lines.write({**told, "groups": groups})

    def close(self) -> None:
        """Another may write from now on."""
        if self._lines is not None:
            unwritten = self._lines.close(PATIENCE_S)
            self._lines = None
            if unwritten:
                with suppress(OSError):  # the output may lie on the same full disk
                    print(f"elastic: {unwritten}", file=sys.stderr, flush=True)
