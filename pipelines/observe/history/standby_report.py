"""The reason why workers stand by, reported when it changes."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from elastic.geometry.layout import Layout
from elastic.planner.standbys import describe_standbys


@dataclass(slots=True)
class StandbyReport:
    """What a journal says about standby workers; the same reason is reported once a session."""

    num_microbatches: int = 0
    max_workers: int | None = None
    _reported: str = ""

    def open(self, line: dict[str, Any]) -> None:
        """Begin a session at its `RunOpened` line."""
        self.num_microbatches = line.get("job", {}).get("num_microbatches", 0)
        self.max_workers = line.get("policy", {}).get("max_workers")
        self._reported = ""

    def news(self, line: dict[str, Any], standbys: Set[str]) -> str:
        """The reason at a `Resume` line; empty if it is not known, or the last one again.

        Standby workers above the run's limit on workers do not count.
        """
        layout, num_standbys = Layout.parse(line["layout"]), len(standbys)
        if self.max_workers is not None:
            num_standbys = min(num_standbys, self.max_workers - layout.num_workers)
        text = describe_standbys(layout, num_standbys, self.num_microbatches)
        is_new = text != self._reported
        self._reported = text
        return text if is_new else ""
