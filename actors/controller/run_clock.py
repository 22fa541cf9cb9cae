"""The run's time: seconds since the epoch that pass like a stopwatch, whatever clocks are set to.

The offset to the wall clock is taken once. Where the journal is ahead of it, time continues from
the last line of the journal, so that no deadline waits until the wall clock has caught up.
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
        """An announced end is posted in the time of this machine's wall clock, whatever the clock
        of the node says; it is converted once, here."""
        if isinstance(event, NodeDraining):
            return replace(event, deadline=self.now() + event.deadline - self._wall())
        return event
