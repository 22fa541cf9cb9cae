"""The fleet and the publisher of a simulated controller: its commands change the world."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from sim.logs import key_of
from sim.shell import ControllerProcess
from sim.timeline import Channel
from sim.world import World

from actors.controller.publisher import StorageOrder
from elastic.protocol.commands import (
    DropCheckpoints,
    ForgetSnapshots,
    Order,
    SetAside,
    StartWorkers,
)
from elastic.protocol.commands import PublishCheckpoint as Publish
from elastic.protocol.commands import QuerySnapshotServers as Query
from elastic.protocol.controller_events import CheckpointsRemoved
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import (
    Checkpointed,
    Event,
    PartFailed,
    StoreLost,
    StoreReady,
    WorkerLost,
)
from elastic.protocol.snapshot_events import (
    SnapshotServerLost,
    SnapshotServerReady,
    SnapshotServerReported,
)

GONE = "it died while the controller was down"


class SimFleet:
    """The processes of a run as one controller commands them, and as the next one finds them."""

    def __init__(self, world: World, process: ControllerProcess) -> None:
        self._world = world
        self._process = process

    def start_store(self) -> None:
        self._process.execute(("StartStore", None, None, ""))
        self._start_store()

    def start_workers(self, command: StartWorkers) -> None:
        self._process.execute(("StartWorkers", None, None, ""))
        for name in command.workers:
            self._world.start_worker(name, command.quarantined)

    def start_snapshot_server(self, node: str) -> None:
        self._process.execute(("StartSnapshotServer", None, None, node))
        self._start_snapshot_server(node)

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        self._process.execute(("QuerySnapshotServers", generation, None, ""))
        self._reach(nodes, Query(generation, tuple(nodes)))

    def forget_snapshots(self, nodes: Sequence[str], generation: int, kept_generation: int) -> None:
        self._process.execute(("ForgetSnapshots", generation, None, ""))
        self._reach(nodes, ForgetSnapshots(generation, tuple(nodes), kept_generation))

    def stop_worker(self, worker: str) -> None:
        self._process.execute(("StopWorker", None, None, worker))
        self._world.stop_worker(worker)

    def stop_snapshot_server(self, node: str) -> None:
        self._process.execute(("StopSnapshotServer", None, None, node))
        world = self._world
        world.timeline.after(world.latency_s(), partial(world.lose_snapshot_server, node))

    def send(self, workers: Iterable[str], order: Order) -> None:
        self._process.execute(key_of(order))
        world = self._world
        for name in workers:
            worker, link = world.workers.get(name), world.links.get(name)
            if worker and link:
                extra_s, link.next_order_delay_s = link.next_order_delay_s, 0.0
                hand = partial(world.hand, worker, world.incarnation, order)
                link.down.send(world.latency_s() + extra_s, hand)

    def probe(self, worker: str) -> Future[int]:
        raise AssertionError("no failure detector probes")

    def process_state(self, worker: str) -> Future[str]:
        raise AssertionError("no failure detector probes")

    def probe_snapshot_server(self, node: str) -> Future[None]:
        raise AssertionError("no failure detector probes")

    def close(self) -> None:
        """Nothing: the world ends with the run."""

    def newest_generation(self) -> int:
        """A frozen worker does not answer."""
        workers = [w for w in self._world.workers.values() if not w.control.frozen]
        return max((worker.newest_generation for worker in workers), default=0)

    def attach(self, state: ControllerState) -> None:
        self._world.checks.draw_ahead()
        self._deliver_late()
        self._find_store(state)
        self._find_snapshot_servers(state)
        self._find_workers(state)

    def end_survivors(self) -> None:
        self._world.end_survivors()

    def _start_store(self) -> None:
        world, process = self._world, self._process

        def listen() -> None:
            if process is world.shell:
                process.post(StoreReady("host", world.open_store()))

        world.timeline.after(world.random.uniform(0.02, 0.2), listen)

    def _start_snapshot_server(self, node: str) -> None:
        world, process = self._world, self._process

        def begin() -> None:
            if process is not world.shell:
                return
            if all(worker.node != node for worker in world.workers.values()):
                process.post(SnapshotServerLost(node, "its node is gone"))
            else:
                process.post(SnapshotServerReady(world.open_snapshot_server(node)))

        world.timeline.after(world.random.uniform(0.02, 0.5), begin)

    def _reach(self, nodes: Sequence[str], command: Query | ForgetSnapshots) -> None:
        world = self._world

        def arrive(node: str) -> None:
            server = world.around.snapshot_servers.get(node)
            if server is None or server.is_frozen:
                return
            if isinstance(command, ForgetSnapshots):
                server.forget(command.generation, command.kept_generation)
            else:
                held = server.slots(), server.parity_slots()
                report = SnapshotServerReported(node, command.generation, held[0], parities=held[1])
                world.post_soon(report, within_s=0.005)

        for node in nodes:
            world.timeline.after(world.latency_s(), partial(arrive, node))

    def _deliver_late(self) -> None:
        """Reports to the dead controller may arrive before, during or after those to this one."""
        world = self._world
        for link in world.links.values():
            link.down = Channel(world.timeline)
        undelivered, world.undelivered = world.undelivered, []
        delay_s = world.random.uniform(0.0, 0.01)
        for arrive in undelivered:
            world.timeline.after(delay_s, arrive)

    def _find_store(self, state: ControllerState) -> None:
        if self._world.around.store_port:
            self._post_at_once(StoreReady("host", self._world.around.store_port))
        elif state.store.port:
            self._post_at_once(StoreLost(GONE))
        else:
            self._start_store()

    def _find_snapshot_servers(self, state: ControllerState) -> None:
        found = self._world.around.snapshot_servers
        for node in sorted(state.snapshots.servers.keys() | state.snapshots.starting_since.keys()):
            if node in found:
                self._post_at_once(SnapshotServerReady(found[node].snapshot_server))
            elif node in state.snapshots.servers:
                self._post_at_once(SnapshotServerLost(node, GONE))
            else:
                self._start_snapshot_server(node)

    def _post_at_once(self, event: Event) -> None:
        self._world.checks.draw_ahead()
        self._process.post(event)

    def _find_workers(self, state: ControllerState) -> None:
        world, known = self._world, state.membership.records
        for unknown in world.nodes.waiting.keys() - known.keys():
            del world.nodes.waiting[unknown]
        for unknown in [w for name, w in world.workers.items() if name not in known]:
            world.kill(unknown, "the controller does not know it")
        for name in sorted(known):
            worker = world.workers.get(name)
            if worker:
                meet = partial(worker.meet, world.incarnation, state.committed_step)
                world.links[name].down.send(world.latency_s(), meet)
                if worker.control.frozen:
                    world.suspect_later(worker)
            elif name in state.membership.warm:
                world.post_soon(WorkerLost(name, GONE))
            elif name not in world.nodes.waiting:
                world.start_worker(name, known[name].quarantined)


class SimPublisher:
    """It publishes and removes at once; its reports to the controller may be late."""

    def __init__(self, world: World, process: ControllerProcess) -> None:
        self._world = world
        self._process = process

    def order(self, command: StorageOrder) -> None:
        if isinstance(command, DropCheckpoints) and not command.dropped:
            return
        self._process.execute(key_of(command))
        storage = self._world.storage
        if isinstance(command, DropCheckpoints):
            storage.drop(command)
            self._confirm(command.dropped)
        elif isinstance(command, SetAside):
            storage.set_aside(command)
            self._confirm(((command.step, command.generation),))
        else:
            self._publish(command)

    def close(self) -> None:
        """Nothing is queued."""

    def _confirm(self, removed: tuple[tuple[int, int], ...]) -> None:
        report = CheckpointsRemoved(removed)
        self._world.published.send(0.01, partial(self._process.post, report))

    def _publish(self, command: Publish) -> None:
        world = self._world
        try:
            saved = world.storage.publish(command)
        except OSError as error:
            self._process.post(PartFailed("", command.generation, command.step, str(error)))
        else:
            # It is visible at once, but the report to the controller may be late.
            report = Checkpointed(saved.step, saved.generation, saved.path)
            delay_s = world.random.uniform(0.0, world.random.choice((0.001, 0.03, 0.3)))
            world.published.send(delay_s, partial(self._process.post, report))
