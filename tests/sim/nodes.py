"""The machines of a simulated cluster: which of them takes a worker, and which are spoilt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable


class Nodes:
    """So many with room for so many workers each; without a number there is always another."""

    def __init__(self, number: int | None, room: int) -> None:
        self.spoilt: set[str] = set()
        """Whoever starts there dies soon."""
        self.waiting: dict[str, tuple[str, ...]] = {}
        """Workers for which there is no room, and the nodes that each avoids."""
        self._number = number
        self._room = room
        self._num_placed = 0

    def place(self, there: Iterable[str], quarantined: Collection[str]) -> str | None:
        """A node for one more worker, beside those that are `there`; None if there is no room."""
        if self._number is None:
            self._num_placed += 1
            return f"n{(self._num_placed - 1) // self._room}"
        load = Counter(there)
        nodes = [f"n{i}" for i in range(self._number) if f"n{i}" not in quarantined]
        fitting = [node for node in nodes if load[node] < self._room]
        return min(fitting, key=lambda node: (load[node], node), default=None)
