"""The run's clock: monotonic time with an offset, in seconds since the epoch.

The offset to the wall clock is taken once. If the journal is ahead of the wall clock, time
continues from its last line. Else every deadline would wait until the wall clock catches up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from elastic.protocol.events import Event, NodeDraining

Clock = Callable[[], float]


class RunClock:
    def __init__(
        self, last: float, wall: Clock = time.time, monotonic: Clock = time.monotonic
    ) -> None:
        """`last` is the time of the journal's last line, 0 if there is none."""
        self._wall, self._monotonic = wall, monotonic
        self._offset = max(wall(), last) - monotonic()

    def now(self) -> float:
        return self._offset + self._monotonic()

    def on_this_clock(self, event: Event) -> Event:
        """Convert the deadline of a drain, which is given in this machine's wall time, to this
        clock; leave other events alone."""
        if isinstance(event, NodeDraining):
            return replace(event, deadline=self.now() + event.deadline - self._wall())
        return event
