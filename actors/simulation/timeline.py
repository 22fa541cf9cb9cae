"""Simulated time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Timeline:
    """Runs actions in the order of their times; of two at one time, the older first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heappush(self._due, (self.now + delay_s, next(self._count), action))

    def run(self, until_s: float, over: Callable[[], bool]) -> None:
        """Let time pass until `over()`, until nothing is due any more, or until `until_s`."""
        while self._due and not over() and self._due[0][0] <= until_s:
            self.now, _, action = heappop(self._due)
            action()
