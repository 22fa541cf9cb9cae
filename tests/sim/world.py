"""A seeded discrete-event world around the real core: workers, messages, storage, restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from sim.checks import Checks
from sim.control import Surroundings
from sim.faults import HARMFUL, STALLS
from sim.lineage import Part
from sim.meetings import Meetings
from sim.nodes import Nodes
from sim.scenario import Scenario, bound_s
from sim.shell import Records, SimShell, replay_whole
from sim.snapshot_server import SimSnapshotServer
from sim.storage import Storage
from sim.timeline import Channel, Timeline
from sim.worker import SimWorker

from elastic.controller.core import Core
from elastic.protocol.commands import (
    Abort,
    Command,
    DropCheckpoints,
    ForgetSnapshots,
    Form,
    Order,
    Pause,
    PublishCheckpoint,
    QuerySnapshotServers,
    RequestCheckpoint,
    Reshard,
    Resume,
    RollForward,
    SaveCheckpoint,
    SendRecords,
    SetAside,
    StartSnapshots,
    StartSnapshotServer,
    StartStore,
    StartWorkers,
    Stopped,
    StopSnapshotServer,
    StopWorker,
)
from elastic.protocol.controller_events import CheckpointsRemoved
from elastic.protocol.events import (
    Checkpointed,
    Event,
    PartFailed,
    RunOpened,
    SnapshotServerLost,
    SnapshotServerReady,
    SnapshotServerReported,
    StoreReady,
    WorkerLost,
    WorkerReady,
    WorkerSuspected,
)
from elastic.protocol.policy import Policy
from elastic.replay.replay import Replay
from elastic.reshard.snapshot_placement import SnapshotServer

Inflict = Callable[["World", str, SimWorker], None]
"""Lets a fault, by its name, strike a worker."""


@dataclass
class Link:
    """The two directions between one worker and the controller."""

    up: Channel
    down: Channel
    lose_next: bool = False
    next_delay_s: float = 0.0
    next_order_delay_s: float = 0.0
    cut: bool = False
    loses_older: bool = False
    """Orders of a controller that has died are not delivered any more."""


class World:
    """One run from its first controller to the end of its last."""

    def __init__(self, scenario: Scenario, inflict: Inflict, keep_journal: bool = False) -> None:
        self.scenario = scenario
        self._inflict = inflict
        self.random = Random(f"world/{scenario.seed}")
        self.timeline = Timeline()
        self.storage = Storage()
        self.workers: dict[str, SimWorker] = {}
        self.links: dict[str, Link] = {}
        self.faults = [replace(fault) for fault in scenario.faults]
        self.struck: list[tuple[float, str, str]] = []
        self.num_flaps = self.num_killed = 0
        self.read: dict[tuple[int, int], list[int]] = {}
        self._num_slow_starters = scenario.num_slow_starters
        self.nodes = Nodes(scenario.num_nodes, scenario.workers_per_node)
        self._num_stores = self._num_snapshot_servers = 0
        self._published = Channel(self.timeline)
        self.undelivered: list[Callable[[], None]] = []
        """Reports that arrived without a controller: Ray delivers them to the next one."""
        restarts = any("restart" in fault.action for fault in self.faults)
        self.records = Records([] if keep_journal or restarts else None)
        self.checks = Checks(
            self.random, bound_s(scenario.policy), self._parts_of, self._snapshots_of
        )
        self.incarnation = 0
        self.open(Core(), scenario.policy)

    def run(self) -> Stopped:
        """Run to the end, or to the first failed check."""
        self.timeline.run(self.scenario.horizon_s, lambda: self.shell.outcome is not None)
        outcome = self.shell.outcome
        assert outcome, f"invariant 9: the run does not end: {self.shell.core.state.phase}"
        state = self.shell.core.state
        self.checks.after_end(outcome, state, self.records, self.storage, self.read)
        struck = {action for _, action, _ in self.struck}
        is_stalled = "took too long" in outcome.reason and struck & STALLS
        storm = len(self.struck) >= self.scenario.policy.max_attempts
        max_start_failures = self.scenario.policy.max_start_failures
        storm |= not state.membership.ever_ready and self.num_killed >= max_start_failures
        if not (storm or is_stalled or struck & HARMFUL):
            assert outcome.outcome == "completed", f"no harmful fault, yet {outcome}"
        return outcome

    def open(self, core: Core, policy: Policy) -> None:
        """A controller opens the run."""
        scenario = self.scenario
        self.incarnation += 1
        self.undelivered.clear()
        self.around = Surroundings(
            self.timeline,
            self.random,
            Meetings(self.random),
            self.storage,
            scenario.job,
            scenario.eval_every,
            policy.collective_timeout_s,
            self._report,
            self._pass_moment,
            self.incarnation,
            snapshot_every=policy.snapshot_every,
            audit_every=policy.audit_every,
            straggler_every=policy.straggler_every,
            step_s=scenario.step_s,
            unwind_s=scenario.unwind_s,
            form_s=scenario.form_s,
            num_kept_events=scenario.num_kept_events,
            num_kept_records=scenario.num_kept_records,
            num_sent_records=scenario.num_sent_records,
            read=self.read,
        )
        self.checks.note_restart(core.state.committed_step)
        self.shell = self.shell_of(core)
        saved = self.storage.whole()
        target_layout = replace(scenario.target_layout, max_workers=policy.max_workers)
        self.shell.post(RunOpened(self.incarnation, policy, target_layout, scenario.job, saved))

    def restart(self, policy: Policy) -> None:
        """Everything but the storage dies, and the run is resumed from its journal."""
        self.shell.close()
        for worker in self.workers.values():
            self.links[worker.name].cut = True
            worker.die()
        self.workers.clear()
        self.nodes.waiting.clear()
        self.open(replay_whole(self.records).core, policy)

    def shell_of(self, core: Core, before: Replay | None = None) -> SimShell:
        check = self.checks.after
        return SimShell(self.timeline, core, self.records, self.carry_out, check, before)

    def post_soon(self, event: Event, within_s: float = 0.02) -> None:
        """Post an event to the controller, if it is still the same by then."""
        self.timeline.after(self.random.uniform(0.0, within_s), partial(self.shell.post, event))

    def kill(self, worker: SimWorker, cause: str, reported_after_s: float | None = None) -> None:
        """A worker's process dies; the controller learns of it a little later."""
        if self.workers.pop(worker.name, None) is None:
            return
        self.num_killed += 1
        worker.die()
        self.around.meetings.break_connections(worker.name)
        self.links[worker.name].cut = self.random.random() < 0.3
        reported_after_s = reported_after_s or self.random.uniform(0.0005, 0.06)
        lost = WorkerLost(worker.name, cause, worker.node)
        self.timeline.after(reported_after_s, partial(self.shell.post, lost))
        self._find_places()
        if reported_after_s > 1.0:
            self.suspect_later(worker)

    def suspect_later(self, worker: SimWorker) -> None:
        suspected = WorkerSuspected(worker.name, "no answer to a probe")
        self.timeline.after(self.random.uniform(1.0, 1.6), partial(self.shell.post, suspected))

    def _parts_of(self, names: set[str]) -> list[tuple[str, Part]]:
        """The parts that these workers, if alive, really hold."""
        alive = (worker for name, worker in self.workers.items() if name in names)
        return [(worker.name, part) for worker in alive for part in worker.holdings()]

    def _snapshots_of(self, report: SnapshotServerReported) -> list[Part]:
        """The parts that a snapshot server really has of its report."""
        snapshot_server = self.around.snapshot_servers.get(report.node)
        present = snapshot_server.slots() if snapshot_server else ()
        slots = [slot for slot in report.slots if snapshot_server and slot in present]
        return [
            snapshot_server.read(s.worker, s.generation, s.step) for s in slots if snapshot_server
        ]

    def _pass_moment(self, name: str, moment: str) -> None:
        worker = self.workers.get(name)
        if worker is None:
            return
        due = [f for f in self.faults if f.is_due(moment, worker.control.world_rank)]
        for fault in due:
            self.faults.remove(fault)
            self.struck.append((self.timeline.now, fault.action, f"{name} in {moment}"))
            self.checks.note_fault(self.timeline.now)
            self._inflict(self, fault.action, worker)

    def _report(self, name: str, incarnation: int, event: Event) -> None:
        """A worker's report is under way; reports arrive in order, or are lost with the worker."""
        link = self.links[name]
        if link.lose_next and getattr(
            event, "generation", 0
        ):  # lose no report of a starting worker
            link.lose_next = False
            return
        extra_s, link.next_delay_s = link.next_delay_s, 0.0

        def arrive() -> None:
            if self.shell.is_closed and self.shell.outcome is None:
                self.undelivered.append(arrive)
                return
            if extra_s:
                self.checks.note_fault(self.timeline.now)
            if not link.cut and incarnation == self.incarnation:
                self.shell.post(event)

        link.up.send(self.latency_s() + extra_s, arrive)

    def carry_out(self, command: Command) -> None:
        match command:
            case StartStore():
                listens = partial(self._store_listens, self.shell)
                self.timeline.after(self.random.uniform(0.02, 0.2), listens)
            case StartWorkers():
                self._start(command.workers, command.quarantined)
            case StopWorker():
                self._stop_worker(command.worker)
            case Form():
                self._send(command.plan.participants, command)
            case Resume():
                self._send((*command.workers, *command.released), command)
            case (
                Abort()
                | RollForward()
                | Reshard()
                | Pause()
                | StartSnapshots()
                | RequestCheckpoint()
                | SaveCheckpoint()
                | SendRecords()
            ):
                self._send(command.workers, command)
            case StartSnapshotServer():
                start = partial(self._keep, self.shell, command.node)
                self.timeline.after(self.random.uniform(0.02, 0.5), start)
            case StopSnapshotServer():
                self.timeline.after(
                    self.latency_s(), partial(self.lose_snapshot_server, command.node)
                )
            case QuerySnapshotServers() | ForgetSnapshots():
                for node in command.nodes:
                    reach = partial(self._reach_snapshot_server, node, command)
                    self.timeline.after(self.latency_s(), reach)
            case PublishCheckpoint() | DropCheckpoints() | SetAside():
                self._store(command)

    def _send(self, names: tuple[str, ...], order: Order) -> None:
        for name in names:
            worker, link = self.workers.get(name), self.links.get(name)
            if worker and link:
                extra_s, link.next_order_delay_s = link.next_order_delay_s, 0.0
                hand = partial(self._hand, worker, self.incarnation, order)
                link.down.send(self.latency_s() + extra_s, hand)

    def _hand(self, worker: SimWorker, incarnation: int, order: Order) -> None:
        is_lost = self.shell.is_closed or incarnation < self.incarnation
        if worker.name in self.workers and not (is_lost and self.links[worker.name].loses_older):
            worker.take(incarnation, order)

    def _store(self, command: PublishCheckpoint | DropCheckpoints | SetAside) -> None:
        if isinstance(command, DropCheckpoints):
            self.storage.drop(command)
            self._confirm(command.dropped)
        elif isinstance(command, SetAside):
            self.storage.set_aside(command)
            self._confirm(((command.step, command.generation),))
        else:
            self._publish(command)

    def _confirm(self, removed: tuple[tuple[int, int], ...]) -> None:
        self._published.send(0.01, partial(self.shell.post, CheckpointsRemoved(removed)))

    def _publish(self, command: PublishCheckpoint) -> None:
        try:
            saved = self.storage.publish(command)
        except OSError as error:
            self.shell.post(PartFailed("", command.generation, command.step, str(error)))
        else:
            # It is visible at once, but the report to the controller may be late.
            report = Checkpointed(saved.step, saved.generation, saved.path)
            delay_s = self.random.uniform(0.0, self.random.choice((0.001, 0.03, 0.3)))
            self._published.send(delay_s, partial(self.shell.post, report))

    def _store_listens(self, starter: SimShell) -> None:
        if starter is not self.shell:
            return
        self._num_stores += 1
        self.around.store_port = self._num_stores
        self.shell.post(StoreReady("host", self._num_stores))

    def _keep(self, starter: SimShell, node: str) -> None:
        if starter is not self.shell:
            return
        if all(worker.node != node for worker in self.workers.values()):
            self.shell.post(SnapshotServerLost(node, "its node is gone"))
            return
        self._num_snapshot_servers += 1
        snapshot_server = SnapshotServer(
            node, "", f"server-{self._num_snapshot_servers}", "host", 1
        )
        self.around.snapshot_servers[node] = SimSnapshotServer(snapshot_server)
        self.shell.post(SnapshotServerReady(snapshot_server))

    def _reach_snapshot_server(
        self, node: str, command: QuerySnapshotServers | ForgetSnapshots
    ) -> None:
        snapshot_server = self.around.snapshot_servers.get(node)
        if snapshot_server is None or snapshot_server.is_frozen:
            return
        if isinstance(command, ForgetSnapshots):
            snapshot_server.forget(command.generation)
        else:
            slots, parities = snapshot_server.slots(), snapshot_server.parity_slots()
            report = SnapshotServerReported(node, command.generation, slots, parities=parities)
            self.post_soon(report, within_s=0.005)

    def lose_snapshot_server(self, node: str) -> None:
        """Its process is gone, with all snapshots."""
        if self.around.snapshot_servers.pop(node, None):
            self.post_soon(SnapshotServerLost(node, "killed"))

    def start_worker(self, name: str, quarantined: tuple[str, ...] = ()) -> None:
        node = self.nodes.place([worker.node for worker in self.workers.values()], quarantined)
        if node is None:
            self.nodes.waiting[name] = quarantined
            return
        warm_up_s = self.random.uniform(0.4, 1.5)
        if self._num_slow_starters:
            self._num_slow_starters -= 1
            warm_up_s = self.random.uniform(6.0, 9.0)
        ready = WorkerReady(name, node, 1, memory_bytes=self.scenario.memory_bytes)
        worker = SimWorker(ready, warm_up_s, self.around)
        self.workers[name] = worker
        self.links[name] = Link(Channel(self.timeline), Channel(self.timeline))
        if self.num_flaps:
            self.num_flaps -= 1
            self._die_at_start(worker, warm_up_s / 2)
        elif node in self.nodes.broken:
            self._die_at_start(worker, warm_up_s * self.random.choice((0.5, 1.5, 3.0)))

    def _start(self, names: Iterable[str], quarantined: tuple[str, ...]) -> None:
        for name in names:
            self.start_worker(name, quarantined)

    def _stop_worker(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker:
            self.timeline.after(self.latency_s(), partial(self.kill, worker, "stopped"))
        elif self.nodes.waiting.pop(name, None) is not None:
            self.post_soon(WorkerLost(name, "it had no node"))

    def _die_at_start(self, worker: SimWorker, after_s: float) -> None:
        self.checks.note_fault(self.timeline.now + after_s)
        self.timeline.after(after_s, partial(self.kill, worker, "dies at each start"))

    def _find_places(self) -> None:
        """Start waiting workers: there is a free node again."""
        waiting, self.nodes.waiting = self.nodes.waiting, {}
        for name, quarantined in waiting.items():
            self.start_worker(name, quarantined)

    def latency_s(self) -> float:
        return self.random.uniform(0.0005, 0.005)
