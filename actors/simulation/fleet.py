"""The fleet and the publisher of a simulated controller: its commands change the world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from actors.controller.publisher import StorageOrder
from actors.simulation.cluster import LATENCY_S, NODE_GONE, SimulatedCluster
from actors.simulation.gang import Gang
from actors.simulation.timeline import Timeline
from elastic.protocol.commands import DropCheckpoints, Order, PublishCheckpoint, StartWorkers
from elastic.protocol.controller_events import CheckpointsRemoved
from elastic.protocol.events import Checkpointed, Event, StoreReady
from elastic.protocol.snapshot_events import (
    SnapshotServerLost,
    SnapshotServerReady,
    SnapshotServerReported,
)
from elastic.reshard.snapshot_placement import SnapshotServer

SERVER_START_S = 0.5


class SimulatedFleet:
    """Workers, snapshot servers and the store in simulated time."""

    def __init__(
        self,
        timeline: Timeline,
        detect_s: float,
        cluster: SimulatedCluster,
        gang: Gang,
        post: Callable[[Event], None],
    ) -> None:
        self._timeline, self._detect_s = timeline, detect_s
        self._cluster, self._gang, self._post = cluster, gang, post
        self._servers: set[str] = set()

    def start_store(self) -> None:
        self._post_soon(StoreReady("simulated", 1))

    def start_workers(self, command: StartWorkers) -> None:
        self._cluster.start(command)

    def stop_worker(self, worker: str) -> None:
        self._cluster.stop(worker)

    def send(self, workers: Iterable[str], order: Order) -> None:
        self._timeline.after(LATENCY_S, partial(self._gang.obey, order))

    def start_snapshot_server(self, node: str) -> None:
        self._timeline.after(SERVER_START_S, partial(self._open_server, node))

    def stop_snapshot_server(self, node: str) -> None:
        self._servers.discard(node)
        self._post_soon(SnapshotServerLost(node, "stopped"))

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        for node in nodes:
            if node in self._servers:
                slots = self._gang.snapshots.slots(node)
                self._post_soon(SnapshotServerReported(node, generation, slots))

    def forget_snapshots(self, nodes: Sequence[str], generation: int, kept_generation: int) -> None:
        """Nothing: the record of snapshots ends with the next snapshot."""

    def lose_node(self, node: str) -> None:
        """The snapshot server of a node is gone with it."""
        if node in self._servers:
            self._servers.discard(node)
            lost = SnapshotServerLost(node, NODE_GONE)
            self._timeline.after(self._detect_s, partial(self._post, lost))

    def probe(self, worker: str) -> Future[int]:
        raise RuntimeError("nothing probes simulated workers")

    def process_state(self, worker: str) -> Future[str]:
        raise RuntimeError("nothing probes simulated workers")

    def probe_snapshot_server(self, node: str) -> Future[None]:
        raise RuntimeError("nothing probes simulated snapshot servers")

    def close(self) -> None:
        """Nothing: the world ends with the run."""

    def _open_server(self, node: str) -> None:
        if node in self._cluster.nodes:
            self._servers.add(node)
            server = SnapshotServer(node, "", f"server-{node}", "simulated", 1)
            self._post(SnapshotServerReady(server))
        else:
            self._post(SnapshotServerLost(node, NODE_GONE))

    def _post_soon(self, event: Event) -> None:
        self._timeline.after(LATENCY_S, partial(self._post, event))


class SimulatedPublisher:
    """It publishes and removes checkpoints at once."""

    def __init__(self, timeline: Timeline, post: Callable[[Event], None]) -> None:
        self._timeline, self._post = timeline, post

    def order(self, command: StorageOrder) -> None:
        done: Event
        if isinstance(command, PublishCheckpoint):
            path = f"step-{command.step}-g{command.generation}"
            done = Checkpointed(command.step, command.generation, path)
        elif isinstance(command, DropCheckpoints):
            if not command.dropped:
                return
            done = CheckpointsRemoved(command.dropped)
        else:
            done = CheckpointsRemoved(((command.step, command.generation),))
        self._timeline.after(LATENCY_S, partial(self._post, done))

    def close(self) -> None:
        """Nothing is queued."""
