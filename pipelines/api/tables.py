"""A run's metrics and events as pandas tables, up to the newest line."""

from __future__ import annotations

import threading
from typing import Any

import pandas

from pipelines.observe.history.run_folder import RunFolder, Tail
from pipelines.observe.view.status import StatusReader
from pipelines.observe.view.status_report import RunStatus

EVENT_COLUMNS = ("time", "step", "generation", "world_size", "kind", "text")


class Tables:
    """Each call reads only what is new since the last one; safe for any thread."""

    def __init__(self, folder: RunFolder) -> None:
        self._status = StatusReader(folder, {})
        self._tail = Tail(folder.metrics)
        self._rows: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def metrics(self) -> pandas.DataFrame:
        """One row per committed step, in order; a redone step has its last row."""
        with self._lock:
            for row in self._tail.drain():
                self._take(row)
            return pandas.DataFrame(list(self._rows.values()))

    def events(self) -> pandas.DataFrame:
        """One row per run event; `time` is in seconds since the epoch."""
        with self._lock:
            run_events = self._status.read().history.membership.run_events
            rows = [[getattr(event, name) for name in EVENT_COLUMNS] for event in run_events]
        return pandas.DataFrame(rows, columns=list(EVENT_COLUMNS))

    def run_status(self) -> RunStatus:
        """Raises `UserError` if the storage cannot be read."""
        with self._lock:
            return self._status.read()

    def _take(self, row: dict[str, Any]) -> None:
        """Add a row; it replaces the rows of the same and of later steps."""
        for step in [step for step in reversed(self._rows) if step >= row["step"]]:
            del self._rows[step]
        reported = row.pop("reported", {})
        self._rows[row["step"]] = {**row, **reported}
