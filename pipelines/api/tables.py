"""A run's files as pandas tables, read as far as they have been written."""

from __future__ import annotations

import threading
from typing import Any

import pandas

from pipelines.observe.history.run_folder import RunFolder, Tail
from pipelines.observe.view.status import Looking
from pipelines.observe.view.status_report import RunStatus

EVENT_COLUMNS = ("time", "step", "generation", "world_size", "kind", "text")


class Tables:
    """Reads on from where it was at each call; may be asked from any thread."""

    def __init__(self, folder: RunFolder) -> None:
        self._looking = Looking(folder, {})
        self._tail = Tail(folder.metrics)
        self._rows: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def metrics(self) -> pandas.DataFrame:
        """One row a committed step, in order; of a step that was redone, the last."""
        with self._lock:
            for row in self._tail.drain():
                self._take(row)
            return pandas.DataFrame(list(self._rows.values()))

    def events(self) -> pandas.DataFrame:
        """One row a thing that happened; `time` is in seconds since the epoch."""
        with self._lock:
            run_events = self._looking.look().history.membership.run_events
            rows = [[getattr(told, name) for name in EVENT_COLUMNS] for told in run_events]
        return pandas.DataFrame(rows, columns=list(EVENT_COLUMNS))

    def run_status(self) -> RunStatus:
        """Raises `UserError` if the storage cannot be read."""
        with self._lock:
            return self._looking.look()

    def _take(self, row: dict[str, Any]) -> None:
        """Whatever came after a step that comes again is void."""
        for step in [step for step in reversed(self._rows) if step >= row["step"]]:
            del self._rows[step]
        self._rows[row["step"]] = row
