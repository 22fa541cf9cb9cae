"""Simulation of a run: the real shell and core over a simulated fleet, along a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nextafter
from typing import Any

from actors.controller.fleet import Fleet
from actors.controller.shell import Shell
from actors.controller.shell_parts import ShellParts
from actors.simulation.cluster import SimulatedCluster, WorkerProcess
from actors.simulation.fleet import SimulatedFleet, SimulatedPublisher
from actors.simulation.gang import Gang
from actors.simulation.inbox import NoDetector, SimulatedInbox
from actors.simulation.ledger import Ledger
from actors.simulation.timeline import Timeline
from actors.storage.checkpoint_files import FoundCheckpoints
from actors.storage.lease import Lease
from actors.storage.memory_storage import MemoryStorage
from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.planner.market.exchange import ON_DEMAND, SPOT
from elastic.protocol.commands import Stopped
from elastic.protocol.controller_events import ControllerRaised
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Event, RunOpened, StopRequested
from elastic.protocol.policy import Policy
from elastic.simulation.costs import Costs
from elastic.simulation.movement import uniform_specs
from elastic.simulation.step_times import LayoutTimes
from elastic.simulation.trace import Availability

LOOK_EVERY_S = 2.0
SAVE_PATIENCE_S = 3600.0
"""How long after the end of its trace a run may take to save and stop."""
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What to simulate; `job.steps` may be out of reach: the run ends with its trace."""

    trace: Availability
    policy: Policy
    job: Job
    target_layout: TargetLayout
    costs: Costs
    workers_per_node: int = 1
    layout: str = ""
    """The target layout as the user wrote it."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The outcome of a run, its ledger, and when it ended, at the latest with its trace.

    `spot_s` and `on_demand_s` are the seconds of all machines that it used until then.
    """

    outcome: Stopped
    ledger: Ledger
    end_s: float
    spot_s: float
    on_demand_s: float


class SimulationFailed(RuntimeError):
    """The controller raised an exception, or the run did not end: a bug, never the trace's."""


def simulate(run: SimulatedRun, take_line: Callable[[Line, bool], None]) -> SimulationResult:
    """Simulate a run to its end. `take_line` gets each line of the journal and of the metrics
    (True), as a real run writes them. Raises `ElasticError` for an impossible layout, and
    `SimulationFailed`."""
    return SimulatedController(run, take_line).run()


class MemoryLines:
    """The writer of a log whose lines go to a function."""

    trouble = ""
    num_waiting = 0

    def __init__(self, take: Callable[[Line], None]) -> None:
        self.write = take

    def flush(self) -> None:
        """Nothing waits."""

    def make_durable(self) -> None:
        """Nothing is lost."""

    def close(self, patience_s: float = 0.0) -> str:
        return ""


class UncontestedLease(Lease):
    """The lease of a run that nothing else can claim."""

    def __init__(self, run: MemoryStorage) -> None:
        super().__init__(run, 1, "lease/1", {}, 1)

    def start_renewing(self, every_s: float = 0.0) -> None:
        """Nothing: no claimant waits for it to expire."""


class WatchedCore(Core):
    """The real core; it notes its newest deadline for the inbox, and what its shell reports."""

    def __init__(self, state: ControllerState) -> None:
        super().__init__(state)
        self.newest_deadline: float | None = None

    def next_deadline(self) -> float | None:
        self.newest_deadline = super().next_deadline()
        return self.newest_deadline


class SimulatedController:
    """One run: the world, and the shell that drives it."""

    def __init__(self, run: SimulatedRun, take_line: Callable[[Line, bool], None]) -> None:
        self._run = run
        self._timeline = timeline = Timeline()
        costs, job, layout = run.costs, run.job, run.target_layout
        step_times = LayoutTimes(
            job, layout, run.policy.max_workers, run.workers_per_node, costs.step_s
        )
        self._cluster = SimulatedCluster(
            timeline, costs, run.workers_per_node, self._post, self._lose, self._lose_node
        )
        specs = uniform_specs(job.state_bytes, layout)
        self._gang = Gang(timeline, costs, job, specs, step_times, self._cluster, self._post)
        shards = max(1, step_times.full.num_workers // step_times.full.dp)
        self._gang.snapshots.every = run.policy.snapshot_every
        self._gang.snapshots.copy_s = job.state_bytes / shards / costs.bytes_per_s
        self._fleet = SimulatedFleet(
            timeline, costs.detect_s, self._cluster, self._gang, self._post
        )
        self._core: WatchedCore | None = None
        self._shell = self._make_shell(take_line)
        self._end_s: float | None = None

    def run(self) -> SimulationResult:
        """Simulate to the end. Raises `SimulationFailed`."""
        run, fleet = self._run, self._fleet
        self._cluster.play(run.trace)
        self._timeline.after(run.trace.end_s, self._end_trace)
        checked_fleet: Fleet = fleet
        opening = RunOpened(0, run.policy, run.target_layout, run.job)
        outcome = self._shell.run(checked_fleet, opening)
        end_s = self._timeline.now if self._end_s is None else self._end_s
        spot_s, on_demand_s = (
            self._cluster.hours.seconds(market, end_s) for market in (SPOT, ON_DEMAND)
        )
        return SimulationResult(outcome, self._gang.ledger, end_s, spot_s, on_demand_s)

    @property
    def now(self) -> float:
        return self._timeline.now

    @property
    def newest_deadline(self) -> float | None:
        return self._core.newest_deadline if self._core is not None else None

    def end_event(self) -> None:
        """Nothing."""

    def wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass for the rest of the world. Raises `SimulationFailed`."""
        timeline = self._timeline
        until = max(timeline.now + seconds, nextafter(timeline.now, inf))
        timeline.run(until, is_over)
        if not is_over():
            timeline.now = until
            if until > self._run.trace.end_s + SAVE_PATIENCE_S:
                raise SimulationFailed("the run does not end with its trace")

    def _make_shell(self, take_line: Callable[[Line, bool], None]) -> Shell:
        storage = MemoryStorage()
        journal = MemoryLines(lambda line: take_line(line, False))
        metrics = MemoryLines(lambda line: take_line(line, True))
        parts = ShellParts(
            wall=lambda: self._timeline.now,
            monotonic=lambda: self._timeline.now,
            sleep=self.wait,
            look_every_s=max(LOOK_EVERY_S, 2 * self._run.costs.step_s),
            make_core=self._watch,
            make_inbox=lambda: SimulatedInbox(self),
            open_journal=lambda *_: journal,
            open_metrics=lambda *_: metrics,
            find_checkpoints=lambda _: FoundCheckpoints((), (), ()),
            open_detector=lambda *_: NoDetector(),
            open_publisher=lambda *_: SimulatedPublisher(self._timeline, self._post),
            open_compactor=lambda *_: None,
        )
        return Shell(storage, UncontestedLease(storage), parts=parts)

    def _watch(self, state: ControllerState) -> WatchedCore:
        self._core = WatchedCore(state)
        return self._core

    def _post(self, event: Event) -> None:
        if isinstance(event, ControllerRaised):
            raise SimulationFailed(f"{event.message}\n{event.traceback}")
        self._shell.post(event)

    def _lose(self, worker: WorkerProcess) -> None:
        self._gang.lose(worker)

    def _lose_node(self, node: str) -> None:
        self._fleet.lose_node(node)

    def _end_trace(self) -> None:
        self._end_s = self._timeline.now
        self._post(StopRequested("the trace ends"))
