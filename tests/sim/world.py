"""A seeded discrete-event world around the real controller: workers, messages, storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from sim.checks import Checks
from sim.control import Surroundings
from sim.faults import (
    DELAYS,
    HARMFUL,
    LATE_DEATHS,
    LATEST_REPORT_S,
    LONGEST_DELAY_S,
    RESTARTS,
    STALLS,
)
from sim.lineage import Part
from sim.meetings import Meetings
from sim.nodes import Nodes
from sim.scenario import Scenario, bound_s
from sim.shell import ControllerProcess, Records
from sim.snapshot_server import SimSnapshotServer
from sim.storage import Storage
from sim.timeline import Channel
from sim.worker import SimWorker

from actors.simulation.timeline import Timeline
from elastic.protocol.commands import Order, Stopped
from elastic.protocol.events import Event, RunOpened, WorkerLost, WorkerReady, WorkerSuspected
from elastic.protocol.policy import Policy
from elastic.protocol.snapshot_events import SnapshotServerLost, SnapshotServerReported
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

    shell: ControllerProcess
    around: Surroundings

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
        self.published = Channel(self.timeline)
        self.undelivered: list[Callable[[], None]] = []
        """Reports that arrived without a controller: Ray delivers them to the next one."""
        restarts = any(fault.action in RESTARTS for fault in self.faults)
        self.records = Records(keep_journal or restarts, Random(f"lost lines/{scenario.seed}"))
        self.checks = Checks(
            self.random, bound_s(scenario.policy), self._parts_of, self._snapshots_of
        )
        self.incarnation = self.since = 0
        self.policy = scenario.policy
        self.successor = "job"
        """What the next controller begins: another `job`, or it takes over from the dead
        `controller`; empty while none is due."""

    def check_end(self, outcome: Stopped) -> None:
        """Check the end of the run."""
        state = self.shell.core.state
        self.checks.after_end(outcome, state, self.records, self.storage, self.read)
        struck = {action for _, action, _ in self.struck}
        save_timeout_s = self.policy.save_timeout_s
        stalls = STALLS | (DELAYS if save_timeout_s < LONGEST_DELAY_S else set())
        stalls |= LATE_DEATHS if save_timeout_s < LATEST_REPORT_S else set()
        is_stalled = "took too long" in outcome.reason and struck & stalls
        storm = len(self.struck) >= self.scenario.policy.max_attempts
        max_start_failures = self.scenario.policy.max_start_failures
        storm |= not state.membership.ever_ready and self.num_killed >= max_start_failures
        if not (storm or is_stalled or struck & HARMFUL):
            assert outcome.outcome == "completed", f"no harmful fault, yet {outcome}"

    @property
    def opening(self) -> RunOpened:
        """What the current job's controllers are to run."""
        policy = self.policy
        target_layout = replace(self.scenario.target_layout, max_workers=policy.max_workers)
        return RunOpened(0, policy, target_layout, self.scenario.job)

    def begin_job(self) -> None:
        """Nothing but the storage is left of an earlier job."""
        scenario, policy = self.scenario, self.policy
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
            snapshot_s=scenario.snapshot_s,
            num_kept_events=scenario.num_kept_events,
            num_kept_records=scenario.num_kept_records,
            num_sent_records=scenario.num_sent_records,
            read=self.read,
        )

    def restart(self, policy: Policy) -> None:
        """Everything but the storage dies, and the run is resumed from its journal."""
        self.shell.die()
        self.end_workers()
        self.policy = policy
        self.successor = "job"

    def end_survivors(self) -> None:
        """End all processes but the controller."""
        self.end_workers()
        self.begin_job()

    def end_workers(self) -> None:
        """Every worker's process is gone, and no report of it arrives any more."""
        for worker in self.workers.values():
            self.links[worker.name].cut = True
            worker.die()
        self.workers.clear()
        self.nodes.waiting.clear()

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
            if self.shell.is_dead:
                self.undelivered.append(arrive)
                return
            if extra_s:
                self.checks.note_fault(self.timeline.now)
            if not link.cut and incarnation == self.incarnation:
                self.shell.post(event)

        link.up.send(self.latency_s() + extra_s, arrive)

    def hand(self, worker: SimWorker, incarnation: int, order: Order) -> None:
        """An order arrives; those of a dead controller may be lost."""
        is_lost = self.shell.is_dead or incarnation < self.incarnation
        if worker.name in self.workers and not (is_lost and self.links[worker.name].loses_older):
            worker.take(incarnation, order)

    def open_store(self) -> int:
        """A new store listens at the returned port."""
        self._num_stores += 1
        self.around.store_port = self._num_stores
        return self._num_stores

    def open_snapshot_server(self, node: str) -> SnapshotServer:
        self._num_snapshot_servers += 1
        name = f"server-{self._num_snapshot_servers}"
        snapshot_server = SnapshotServer(node, "", name, "host", 1)
        self.around.snapshot_servers[node] = SimSnapshotServer(snapshot_server)
        return snapshot_server

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

    def stop_worker(self, name: str) -> None:
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
