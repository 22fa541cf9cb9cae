"""Nodes of a simulated cluster: which one gets a new worker, and which are broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable


class Nodes:
    """A number of nodes with capacity for some workers each; without a number there is always
    another."""

    def __init__(self, number: int | None, room: int) -> None:
        self.broken: set[str] = set()
        """Nodes on which every worker dies soon after its start."""
        self.waiting: dict[str, tuple[str, ...]] = {}
        """Workers without a free node, and the quarantined nodes that each must not use."""
        self._number = number
        self._room = room
        self._num_placed = 0

    def place(self, occupied: Iterable[str], quarantined: Collection[str]) -> str | None:
        """A node for one more worker, beside the nodes of the existing ones; None if all are
        full."""
        if self._number is None:
            self._num_placed += 1
            return f"n{(self._num_placed - 1) // self._room}"
        load = Counter(occupied)
        nodes = [f"n{i}" for i in range(self._number) if f"n{i}" not in quarantined]
        fitting = [node for node in nodes if load[node] < self._room]
        return min(fitting, key=lambda node: (load[node], node), default=None)
