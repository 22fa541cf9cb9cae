"""GCP: a machine is told that it is preempted thirty seconds ahead."""

from __future__ import annotations

import time
from collections.abc import Callable

from actors.notices.notice import LINK_LOCAL, Notice, ask

HEADERS = {"Metadata-Flavor": "Google"}
SHUTDOWN_S = 30.0
"""From the signal to the end, if the machine does not go by itself."""


class Gcp:
    """Source: Google Cloud, Compute Engine, "Preemption process" and "About VM metadata"."""

    def __init__(self, address: str = LINK_LOCAL, clock: Callable[[], float] = time.time) -> None:
        self._url = f"{address}/computeMetadata/v1/instance/preempted"
        self._clock = clock
        self._deadline: float | None = None

    def look(self) -> Notice | None:
        """See `Source`. Nobody says since when it is so: it is counted from when it was seen."""
        told = ask(self._url, HEADERS)
        if told not in ("TRUE", "FALSE"):
            raise ValueError(f"it says {told!r}: this is not GCP")
        if told == "FALSE":
            self._deadline = None
            return None
        if self._deadline is None:
            self._deadline = self._clock() + SHUTDOWN_S
        return Notice("GCP preemption", self._deadline)
