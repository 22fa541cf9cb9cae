"""A seeded discrete-event world around the real core: workers, messages, faults, restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from elastic.commands import (
    Abort,
    Command,
    Form,
    Pause,
    PublishCheckpoint,
    Relayout,
    Resume,
    SaveCheckpoint,
    Settle,
    StartStore,
    StartWorkers,
    Stopped,
    StopWorker,
)
from elastic.core import Core
from elastic.events import (
    Checkpointed,
    Event,
    NodeDraining,
    PartFailed,
    RunOpened,
    StopRequested,
    StoreLost,
    StoreReady,
    WorkerLeaving,
    WorkerLost,
    WorkerReady,
    WorkerSuspected,
)
from elastic.state import CoreState
from sim.checks import Checks
from sim.control import Surroundings
from sim.lineage import Part
from sim.meetings import Meetings
from sim.scenario import Scenario, bound_s
from sim.shell import Records, SimShell, replay
from sim.storage import Storage
from sim.timeline import Channel, Timeline
from sim.worker import Order, SimWorker

HORIZON_S = 600.0


class World:
    """One run from its first controller to the end of its last."""

    def __init__(self, scenario: Scenario, keep_journal: bool = False) -> None:
        self.scenario = scenario
        self.random = Random(f"world/{scenario.seed}")
        self.timeline = Timeline()
        self.storage = Storage()
        self.workers: dict[str, SimWorker] = {}
        self.happened: list[str] = []
        restarts = any(fault.action == "restart" for fault in scenario.faults)
        self.records = Records([] if keep_journal or restarts else None)
        self.policy = scenario.policy
        self._num_flaps = 0
        self._num_slow = scenario.num_slow_starters
        self._lost_reports: dict[str, float | None] = {}
        self.checks = Checks(self.random, bound_s(scenario.policy), self._parts_of)
        self._open(Core(), incarnation=1)

    def run(self) -> Stopped:
        """To the end; the checks raise AssertionError."""
        self.timeline.run(HORIZON_S, lambda: self.shell.outcome is not None)
        assert self.shell.outcome, f"invariant 9: no end in sight: {self.shell.core.state.phase}"
        return self.shell.outcome

    def inflict(self, action: str, worker: SimWorker) -> None:
        """Let a fault befall a worker or those around it."""
        now = self.timeline.now
        self.happened.append(f"{now:8.3f} {action}: {worker.name}")
        self.checks.note_fault(now)
        inflict(self, action, worker)

    def post_soon(self, event: Event) -> None:
        self.timeline.after(self.random.uniform(0.0, 0.02), partial(self.shell.post, event))

    def kill(self, worker: SimWorker, cause: str, told_after_s: float | None = None) -> None:
        """Its process is gone; the controller hears of it a little later."""
        if not worker.control.alive:
            return
        worker.die()
        del self.workers[worker.name]
        self._around.meetings.break_connections(worker.name)
        if self.random.random() < 0.3:
            self._lost_reports[worker.name] = None  # what is under way is lost with it
        told_s = told_after_s or self.random.uniform(0.005, 0.06)
        self.timeline.after(told_s, partial(self.shell.post, WorkerLost(worker.name, cause)))

    def freeze(self, worker: SimWorker) -> None:
        """Its probes go unanswered until somebody looks."""
        worker.freeze()
        suspected = WorkerSuspected(worker.name, "no answer to a probe")
        self.timeline.after(self.random.uniform(1.0, 1.6), partial(self.shell.post, suspected))
