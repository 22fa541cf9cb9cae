"""Which nodes of a run will be gone: what their watchers and Ray say, each told to the other.

Nobody tells Ray of a cloud's notices. Unless it knows, it places the replacement of a worker that
has left such a node on that very node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Set

from actors.notices import Notice
from actors.ray_private import drain_node, draining_nodes
from elastic.events import Event, NodeAtRisk, NodeDraining

NO_DEADLINE_S = 600.0
"""Ray may drain a node without a deadline; it is left at the next boundary all the same."""
SAME_S = 1.0


class Drains:
    """Each notice is posted once; `take` may be called from any thread."""

    def __init__(
        self,
        post: Callable[[Event], None],
        tell_ray: Callable[[str, str, float], None] = drain_node,
        ask_ray: Callable[[], Mapping[str, float]] = draining_nodes,
    ) -> None:
        self._post, self._tell_ray, self._ask_ray = post, tell_ray, ask_ray
        self._told: dict[str, list[float | None]] = {}
        self._untold: dict[str, Notice] = {}
        """What Ray does not know yet."""
        self._lock = threading.Lock()

    def take(self, node: str, notice: Notice | None) -> None:
        """What a node's own watcher says."""
        if notice is not None and self._tell(node, notice) and notice.deadline is not None:
            with self._lock:
                self._untold[node] = notice

    def exchange(self, nodes: Set[str]) -> None:
        """Tell Ray what it does not know, and ask it about these nodes. Raises RayError."""
        with self._lock:
            untold = dict(self._untold)
        for node, notice in untold.items():
            assert notice.deadline is not None
            self._tell_ray(node, notice.cause, notice.deadline)
            with self._lock:
                del self._untold[node]
        for node, deadline in sorted(self._ask_ray().items()):
            if node in nodes:
                self._tell(node, Notice("Ray drains it", deadline or self._first_known(node)))

    def _first_known(self, node: str) -> float:
        with self._lock:
            told = [d for d in self._told.get(node, []) if d is not None]
        return told[0] if told else time.time() + NO_DEADLINE_S

    def _tell(self, node: str, notice: Notice) -> bool:
        """Post it, unless that has been done."""
        with self._lock:
            told = self._told.setdefault(node, [])
            if any(_are_same(notice.deadline, other) for other in told):
                return False
            told.append(notice.deadline)
        if notice.deadline is None:
            self._post(NodeAtRisk(node, notice.cause))
        else:
            self._post(NodeDraining(node, notice.deadline, notice.cause))
        return True


def _are_same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) < SAME_S
