"""Which nodes of a run will be gone: what their watchers and Ray say, each told to the other.

Nobody tells Ray of a cloud's notices. Unless it knows, it places the replacement of a worker that
has left such a node on that very node.

A node says how much time it has left by its own clock. From then on this machine's clock counts,
which is also Ray's: the controller runs where Ray's head is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Set

from actors.notices import Notice, SeenNotice
from actors.ray_backend.cluster.ray_private import drain_node, draining_nodes
from elastic.protocol.events import Event, NodeAtRisk, NodeDraining

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
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._post, self._tell_ray, self._ask_ray = post, tell_ray, ask_ray
        self._wall = wall
        self._seen: dict[str, list[float | None]] = {}
        """The deadlines of each node's own notices, by its clock: they tell notices apart."""
        self._told: dict[str, list[float]] = {}
        """The deadlines of each node that have been posted, by this machine's clock."""
        self._untold: dict[str, Notice] = {}
        """What Ray does not know yet."""
        self._lock = threading.Lock()

    def take(self, node: str, seen: SeenNotice | None) -> None:
        """What a node's own watcher says, just now."""
        if seen is None or not self._is_new(node, seen.notice.deadline):
            return
        cause = seen.notice.cause
        if seen.left_s is None:
            self._post(NodeAtRisk(node, cause))
            return
        deadline = self._wall() + seen.left_s
        if self._tell(node, cause, deadline):
            with self._lock:
                self._untold[node] = Notice(cause, deadline)

    def _is_new(self, node: str, deadline: float | None) -> bool:
        """Whether the node has not said so before."""
        with self._lock:
            seen = self._seen.setdefault(node, [])
            is_new = not any(_are_same(deadline, other) for other in seen)
            if is_new:
                seen.append(deadline)
        return is_new

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
                self._tell(node, "Ray drains it", deadline or self._first_known(node))

    def _first_known(self, node: str) -> float:
        with self._lock:
            told = self._told.get(node, [])
            return told[0] if told else self._wall() + NO_DEADLINE_S

    def _tell(self, node: str, cause: str, deadline: float) -> bool:
        """Post it, unless that has been done."""
        with self._lock:
            told = self._told.setdefault(node, [])
            if any(_are_same(deadline, other) for other in told):
                return False
            told.append(deadline)
        self._post(NodeDraining(node, deadline, cause))
        return True


def _are_same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) < SAME_S
