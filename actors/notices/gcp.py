"""GCP notices: preemption, thirty seconds ahead."""

from __future__ import annotations

import time
from collections.abc import Callable

from actors.notices.notice import LINK_LOCAL, Notice, query_metadata

HEADERS = {"Metadata-Flavor": "Google"}
SHUTDOWN_S = 30.0
"""From the signal to the forced end of the machine."""


class Gcp:
    """Source: Google Cloud, Compute Engine, "Preemption process" and "About VM metadata"."""

    def __init__(self, address: str = LINK_LOCAL, clock: Callable[[], float] = time.time) -> None:
        self._url = f"{address}/computeMetadata/v1/instance/preempted"
        self._clock = clock
        self._deadline: float | None = None

    def poll(self) -> Notice | None:
        """See `NoticeSource`. The answer has no time: the deadline counts from the first sight."""
        preempted = query_metadata(self._url, HEADERS)
        if preempted not in ("TRUE", "FALSE"):
            raise ValueError(f"the metadata server answers {preempted!r}: this is not GCP")
        if preempted == "FALSE":
            self._deadline = None
            return None
        if self._deadline is None:
            self._deadline = self._clock() + SHUTDOWN_S
        return Notice("GCP preemption", self._deadline)
