"""Snapshot servers as Ray actors: the actor, and the fleet's record of active and standby ones.

This module imports no torch, so that a snapshot server starts fast and stays small.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray

from actors.ray_backend.actor_losses import cause_of
from actors.ray_backend.actor_names import find_actors, newest_by_node
from actors.ray_backend.cluster.node_labels import head_host, place_here
from actors.ray_backend.detached_actor import DetachedActor
from actors.runtime.network import Network, listen_address
from actors.snapshots.server import SnapshotServerProcess
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Event
from elastic.protocol.snapshot_events import (
    SnapshotServerLost,
    SnapshotServerReady,
    SnapshotServerReported,
)
from elastic.reshard.snapshot_placement import SnapshotServer

RESTART_PAUSE_S = 30.0
"""The pause after the death of a standby before its node gets another one."""


class RaySnapshotServer(DetachedActor):
    """A node's snapshot server; it listens from its start and is empty until workers write."""

    def __init__(
        self,
        network: Network,
        secret: bytes,
        max_snapshot_bytes: int | None,
        orphan_timeout_s: float,
    ) -> None:
        super().__init__(orphan_timeout_s)
        place, host = place_here(), listen_address(network, head_host())
        self._server = SnapshotServerProcess(
            place.node, place.rack, host, secret, network, max_snapshot_bytes
        )

    def snapshot_server(self) -> SnapshotServer:
        return self._server.snapshot_server

    def report(self, generation: int) -> SnapshotServerReported:
        return self._server.report(generation)

    def forget(self, generation: int, kept_generation: int) -> None:
        self._server.forget(generation, kept_generation)


class SnapshotServers:
    """The snapshot servers of a run: active ones hold snapshots, standby ones only wait on nodes
    that have workers. Any thread may call the methods."""

    def __init__(
        self,
        run_name: str,
        start: Callable[[str], Any],
        post: Callable[[Event], None],
        has_standbys: bool,
    ) -> None:
        """`start` starts a snapshot server on a node; `has_standbys` keeps standbys ready."""
        self._run_name = run_name
        self._start = start
        self._post = post
        self._has_standbys = has_standbys
        self._active: dict[str, Any] = {}
        self._standby: dict[str, Any] = {}
        self._not_before: dict[str, float] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._active)

    @property
    def nodes(self) -> set[str]:
        """The nodes of the active snapshot servers."""
        with self._lock:
            return set(self._active)

    def start(self, node: str) -> None:
        """See `Fleet.start_snapshot_server`: activate the node's standby, or start a new one."""
        with self._lock:
            standby = self._standby.pop(node, None)
        self._activate(node, standby or self._start(node))

    def query(self, nodes: Sequence[str], generation: int) -> None:
        for server in self._on(nodes):
            _when_done(server.report.remote(generation), self._post_report)

    def forget(self, nodes: Sequence[str], generation: int, kept_generation: int) -> None:
        for server in self._on(nodes):
            server.forget.remote(generation, kept_generation)

    def probe(self, node: str) -> Future[None] | None:
        """The answer to a probe; None if the node has no active snapshot server."""
        servers = self._on([node])
        if not servers:
            return None
        answer: Future[None] = servers[0].hear.remote().future()
        return answer

    def stop(self, node: str) -> None:
        for server in self._on([node]):
            ray.kill(server)

    def attach(self, state: ControllerState) -> None:
        """See `Survivors`. A snapshot server that the journal does not know is a standby."""
        expected = state.snapshots.servers.keys() | state.snapshots.starting_since.keys()
        survivors = newest_by_node(find_actors(self._run_name, "snapshot_server"))
        for node, server in sorted(survivors.items()):
            if node in expected:
                self._activate(node, server)
            else:
                self._note_standby(node, server)
        for node in sorted(state.snapshots.servers.keys() - survivors.keys()):
            self._post(SnapshotServerLost(node, "it was gone when the controller came back"))
        for node in sorted(state.snapshots.starting_since.keys() - survivors.keys()):
            self.start(node)

    def keep_standbys(self, nodes: Collection[str]) -> None:
        """Keep a snapshot server on each of these nodes, which have workers, and end the standbys
        on all others."""
        if not self._has_standbys:
            return
        with self._lock:
            now = time.monotonic()
            busy = self._active.keys() | self._standby.keys()
            missing = [n for n in nodes if n not in busy and now >= self._not_before.get(n, 0.0)]
            deserted = [self._standby.pop(n) for n in self._standby.keys() - set(nodes)]
        for server in deserted:
            ray.kill(server)  # else its node would not be idle, and never be released
        for node in sorted(missing):
            server = self._start(node)
            self._note_standby(node, server)
            if self._is_closed:
                ray.kill(server)

    def beat(self) -> None:
        """Greet the standbys, which get no probes, so that they do not end as orphans."""
        with self._lock:
            standbys = list(self._standby.values())
        for server in standbys:
            server.hear.remote()

    def close(self, kill: Callable[[Any], None]) -> None:
        """End all snapshot servers."""
        self._is_closed = True
        with self._lock:
            servers = [*self._active.values(), *self._standby.values()]
            self._standby.clear()
        for server in servers:
            kill(server)

    def _activate(self, node: str, server: Any) -> None:
        with self._lock:
            self._active[node] = server
        _when_done(server.snapshot_server.remote(), self._ready)
        _when_done(server.live.remote(), partial(self._lost, node, server))

    def _note_standby(self, node: str, server: Any) -> None:
        with self._lock:
            self._standby[node] = server
        _when_done(server.live.remote(), partial(self._standby_lost, node, server))

    def _on(self, nodes: Sequence[str]) -> list[Any]:
        with self._lock:
            return [self._active[node] for node in nodes if node in self._active]

    def _ready(self, answer: Future[SnapshotServer]) -> None:
        if answer.exception() is None:
            self._post(SnapshotServerReady(answer.result()))

    def _post_report(self, answer: Future[SnapshotServerReported]) -> None:
        if answer.exception() is None:
            self._post(answer.result())

    def _lost(self, node: str, server: Any, life: Future[Any]) -> None:
        with self._lock:
            if self._active.get(node) is not server:
                return  # it was stopped while it started, and another has been started since
            del self._active[node]
        if not self._is_closed:
            self._post(SnapshotServerLost(node, cause_of(life.exception())))

    def _standby_lost(self, node: str, server: Any, life: Future[Any]) -> None:
        with self._lock:
            if self._standby.get(node) is server:
                del self._standby[node]
                self._not_before[node] = time.monotonic() + RESTART_PAUSE_S


def _when_done(answer: Any, then: Callable[[Future[Any]], None]) -> None:
    answer.future().add_done_callback(then)
