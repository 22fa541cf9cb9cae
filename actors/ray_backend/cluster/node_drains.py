"""Node drains: notices from the nodes' watchers and from Ray, each passed on to the other.

Ray does not learn of a cloud's notices by itself. Without them it would place the replacement of a
drained worker on the very node that ends.

A node reports its remaining time by its own clock. From then on this machine's clock counts, which
is also Ray's: the controller runs on Ray's head node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Set

from actors.notices import Notice, TimedNotice
from actors.ray_backend.cluster.ray_private import drain_node, draining_nodes
from elastic.protocol.events import Event, NodeAtRisk, NodeDraining

NO_DEADLINE_S = 600.0
"""The deadline of a drain for which Ray gives none; workers leave at the next boundary anyway."""
SAME_S = 1.0


class Drains:
    """Posts each notice once; any thread may call `take`."""

    def __init__(
        self,
        post: Callable[[Event], None],
        drain_in_ray: Callable[[str, str, float], None] = drain_node,
        query_ray: Callable[[], Mapping[str, float]] = draining_nodes,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._post, self._drain_in_ray, self._query_ray = post, drain_in_ray, query_ray
        self._wall = wall
        self._seen: dict[str, list[float | None]] = {}
        """The deadlines of each node's own notices, by its clock: they distinguish notices."""
        self._posted: dict[str, list[float]] = {}
        """The posted deadlines of each node, by this machine's clock."""
        self._unknown_to_ray: dict[str, Notice] = {}
        """The notices that Ray does not know yet."""
        self._lock = threading.Lock()

    def take(self, node: str, seen: TimedNotice | None) -> None:
        """Take the present notice of a node's own watcher."""
        if seen is None or not self._is_new(node, seen.notice.deadline):
            return
        cause = seen.notice.cause
        if seen.left_s is None:
            self._post(NodeAtRisk(node, cause))
            return
        deadline = self._wall() + seen.left_s
        if self._post_once(node, cause, deadline):
            with self._lock:
                self._unknown_to_ray[node] = Notice(cause, deadline)

    def _is_new(self, node: str, deadline: float | None) -> bool:
        """Whether the node has not given this notice before."""
        with self._lock:
            seen = self._seen.setdefault(node, [])
            is_new = not any(_are_same(deadline, other) for other in seen)
            if is_new:
                seen.append(deadline)
        return is_new

    def exchange(self, nodes: Set[str]) -> None:
        """Pass new notices on to Ray, and take Ray's drains of these nodes. Raises RayError."""
        with self._lock:
            notices = dict(self._unknown_to_ray)
        for node, notice in notices.items():
            assert notice.deadline is not None
            self._drain_in_ray(node, notice.cause, notice.deadline)
            with self._lock:
                del self._unknown_to_ray[node]
        for node, deadline in sorted(self._query_ray().items()):
            if node in nodes:
                self._post_once(node, "Ray drains it", deadline or self._first_known(node))

    def _first_known(self, node: str) -> float:
        with self._lock:
            posted = self._posted.get(node, [])
            return posted[0] if posted else self._wall() + NO_DEADLINE_S

    def _post_once(self, node: str, cause: str, deadline: float) -> bool:
        """Post a drain unless it was posted before; return whether it was new."""
        with self._lock:
            posted = self._posted.setdefault(node, [])
            if any(_are_same(deadline, other) for other in posted):
                return False
            posted.append(deadline)
        self._post(NodeDraining(node, deadline, cause))
        return True


def _are_same(deadline: float | None, other: float | None) -> bool:
    if deadline is None or other is None:
        return deadline is other
    return abs(deadline - other) < SAME_S
