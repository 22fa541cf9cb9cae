"""The log `statistics.jsonl` of a run: statistics of the model's parameters and gradients."""

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
"""How long an ending or aborted worker waits for a storage that does not accept lines."""


class StatisticsLog:
    """One worker's access to the log. World rank 0 writes; each generation may have another one.

    This log never ends training and never makes it wait for an object store: lines that storage
    does not accept stay in memory.
    """

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._lines: Lines | None = None

    def log_step(self, replica: Replica, record: StepRecord, world_rank: int) -> None:
        """Write the line of a committed step, if one is due. Every rank calls this."""
        groups = replica.statistics()
        if groups is None or world_rank != 0:
            return
        if self._lines is None:
            log = LineLog(self._run, STATISTICS)
            self._lines = open_lines(log, record.generation, opens_later=True)
        label = {"time": record.time, "step": record.step, "generation": record.generation}
        self._lines.write({**label, "groups": groups})

    def close(self) -> None:
        """Let another worker write from now on."""
        if self._lines is not None:
            unwritten = self._lines.close(PATIENCE_S)
            self._lines = None
            if unwritten:
                with suppress(OSError):  # the output may be on the same full disk
                    print(f"elastic: {unwritten}", file=sys.stderr, flush=True)
