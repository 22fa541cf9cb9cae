"""The time axis of the timeline picture: shortened stops, ticks in human units."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
from matplotlib.axes import Axes

from pipelines.observe.history.history import History

INTERVALS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600),
    *(43200, 86400, 172800, 432000, 864000, 1728000, 4320000, 8640000),
)
SHOWN_STOP = 0.025
"""A stop takes at most this share of the driven time on the axis."""


class TimeAxis:
    """Maps seconds since the epoch to seconds on the axis.

    Long stops are shortened, so that a run that was stopped overnight shows its work.
    """

    def __init__(self, history: History) -> None:
        sessions = history.membership.sessions
        points = history.progress.curve.points
        starts = [session.start for session in sessions]
        ends = [session.end for session in sessions]
        if points:
            ends[-1] = max(ends[-1], points[-1].time)
        driven_s = sum(ends) - sum(starts)
        self.start = starts[0]
        self.stops: list[tuple[float, float, float]] = []
        """The begin and end on the axis of each shortened stop, and its duration."""
        self._times: list[float] = []
        self._places: list[float] = []
        place = 0.0
        for start, end in zip(starts, ends, strict=True):
            if self._times:
                stop_s = start - self._times[-1]
                shown_s = min(stop_s, SHOWN_STOP * driven_s)
                if shown_s < stop_s:
                    self.stops.append((place, place + shown_s, stop_s))
                place += shown_s
            self._times += [start, end]
            self._places += [place, place + end - start]
            place = self._places[-1]
        self.length_s = max(place, 1e-3)

    def place(self, time: float) -> float:
        return float(np.interp(time, self._times, self._places))

    def spans_stop(self, start: float, end: float) -> bool:
        """Whether a shortened stop lies between two times."""
        left, right = self.place(start), self.place(end)
        return any(left <= begin and stop <= right for begin, stop, _ in self.stops)

    def label(self, axes: Axes, colour: str) -> None:
        """Add at most twelve ticks and the start time of the run below a panel."""
        interval = next((i for i in INTERVALS_S if self.length_s / i <= 12), INTERVALS_S[-1])
        ticks = np.arange(0, self.length_s * 1.0001, interval)
        axes.set_xticks(ticks, [_tick(tick, interval) for tick in ticks])
        start = "the start"  # a simulated run begins at 0
        if self.start > 0:
            start = datetime.fromtimestamp(self.start, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        note = ", stops shortened" if self.stops else ""
        axes.set_xlabel(f"time since {start}{note}", color=colour, fontsize=9.5, labelpad=7)


def _tick(seconds: float, interval: float) -> str:
    if seconds == 0:
        return "0"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if interval >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
