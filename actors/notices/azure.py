"""Azure notices: scheduled events, 30 s ahead for spot machines and minutes ahead for others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from actors.notices.notice import LINK_LOCAL, Notice, epoch_of, query_metadata

HEADERS = {"Metadata": "true"}
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""`Freeze` does not end a machine: it pauses for some seconds."""


class Azure:
    """Source: Microsoft, Azure Virtual Machines, "Scheduled Events for Linux VMs"."""

    def __init__(self, address: str = LINK_LOCAL, clock: Callable[[], float] = time.time) -> None:
        self._address = address
        self._clock = clock
        self._name = ""
        self._begun: dict[str, float] = {}
        """When this source first saw each event that names no time."""

    def poll(self) -> Notice | None:
        """See `NoticeSource`. The answer also has the events of other machines of the same set."""
        self._name = self._name or query_metadata(f"{self._address}{NAME}", HEADERS) or ""
        answer = query_metadata(f"{self._address}{EVENTS}", HEADERS)
        if not self._name or answer is None:
            raise ValueError("the metadata server gives no machine name: this is not Azure")
        notices = [
            Notice(f"Azure {event['EventType']}", self._deadline(event))
            for event in json.loads(answer)["Events"]
            if event["EventType"] in ENDS and self._name in event["Resources"]
        ]
        return min(notices, key=lambda notice: notice.deadline or 0.0, default=None)

    def _deadline(self, event: Mapping[str, Any]) -> float:
        """The earliest time of the event; an event that has begun names none."""
        if event["NotBefore"]:
            return epoch_of(parsedate_to_datetime(event["NotBefore"]))
        return self._begun.setdefault(event["EventId"], self._clock())
