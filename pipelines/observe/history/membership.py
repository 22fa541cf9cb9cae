"""Membership of a run over time: workers, world sizes and events, from its journal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic.protocol.wire import is_progress, is_steps, steps_in
from pipelines.observe.history.formatting import counted, duration, shortened
from pipelines.observe.history.hang import diagnose
from pipelines.observe.history.run_events import (
    KINDS_WITH_STEP,
    PHASES,
    RunEvent,
    Session,
    Stretch,
    WorkerPlace,
    controller_text,
    evaluation_text,
    market_text,
    rollback_text,
    step_time_text,
)
from pipelines.observe.history.standby_report import StandbyReport

MAX_KEPT = 4096
QUARANTINED = "its node is quarantined"


@dataclass(slots=True)
class Membership:
    """The membership and events of a run, as of the last journal line."""

    run_events: list[RunEvent] = field(default_factory=list)
    """The newest `MAX_KEPT`."""
    dropped: dict[str, int] = field(default_factory=dict)
    """The number of older events of each kind."""
    stretches: list[Stretch] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    members: tuple[str, ...] = ()
    ranked: tuple[str, ...] = ()
    """The members at the begin of the generation, by world rank."""
    standbys: set[str] = field(default_factory=set)
    starting: set[str] = field(default_factory=set)
    """Requested, but not warm yet."""
    places: dict[str, WorkerPlace] = field(default_factory=dict)
    """The placement of every worker that was ever warm."""
    quarantined: dict[str, float] = field(default_factory=dict)
    """Nodes on which no worker is started, and until when (seconds since the epoch)."""
    compute_s: dict[str, float] = field(default_factory=dict)
    """The recent compute time per step of each member, without its waits for others."""
    layout: str = ""
    generation: int = 0
    step: int = 0
    phase: str = "starting"
    outcome: str | None = None
    max_workers: int | None = None
    total_steps: int | None = None
    num_lost: int = 0
    num_joined: int = 0
    num_not_finite: int = 0
    """Evaluations with a loss or metric that was not finite."""
    waiting_since: float | None = None
    """When the run began to wait, if it is waiting."""
    recovery_s: float | None = None
    """The duration of the newest recovery: from the first sign of trouble to `Resume`."""
    _draining: dict[str, str] = field(default_factory=dict)
    """The cause for each draining worker."""
    _gone: set[str] = field(default_factory=set)
    _failed_checkpoint: tuple[str, int] = ("", 0)
    _reported_without_replicas: set[str] = field(default_factory=set)
    """The layouts for which an event says that an audit compares nothing."""
    _hang_reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The `HangObserved` line of each worker, until the hang is over."""
    _standby_report: StandbyReport = field(default_factory=StandbyReport)
    _trouble_since: float | None = None
    _has_resumed: bool = False

    def take(self, line: dict[str, Any]) -> None:
        """Add one journal line; a line of an unknown name only advances the time."""
        name = line.get("event") or line.get("command") or ""
        if name == "RunOpened":
            self._open(line)
        self._extend_session(line["time"])
        if name in PHASES:
            self.phase, self.waiting_since = PHASES[name], None
        if is_steps(line) or is_progress(line):
            self._advance(line)
        self._take_hang(name, line)
        if "warning" in line:
            self._note(line, "failed checkpoint", line["warning"], cause=line["warning"])
        match name:
            case "WorkerReady":
                self._add_worker(line)
            case "WorkerLost" | "StopWorker":
                self._remove_worker(line)
            case "WorkerDraining" | "NodeDraining":
                self._drain(line)
            case "Abort":
                self._abort(line["time"])
            case "Resume":
                self._resume(line)
            case "StartWorkers":
                self.starting.update(line["workers"])
            case "StepCommitted":
                self.step = line["record"]["step"]
            case "ComputeTimed":
                times = dict(zip(self.ranked, line["compute_s"], strict=False))
                self.compute_s = times or self.compute_s  # a short line lists only stragglers
            case "Replaced" | "NodeQuarantined" | "NodeReleased" | "MarketChosen":
                self._take_health(name, line)
            case _:
                self._take_other(name, line)

    def _advance(self, line: dict[str, Any]) -> None:
        """Advance the step by a line that stands for several steps."""
        if is_steps(line):
            *_, (_, _, self.step, _) = steps_in(line)
            return
        self.step = line["step"]
        times = dict(zip(self.ranked, line.get("compute_s", ()), strict=False))
        self.compute_s = times or self.compute_s

    def wall_s(self, now: float | None = None) -> float:
        """The seconds of all sessions of the run, without the time in which it was stopped."""
        sessions_s = sum(session.end - session.start for session in self.sessions)
        if now is None or self.outcome or not self.sessions:
            return sessions_s
        return sessions_s + max(0.0, now - self.sessions[-1].end)

    @property
    def num_run_events(self) -> int:
        """The number of all events, including the dropped ones."""
        return sum(self.dropped.values()) + len(self.run_events)

    def last(self, kind: str) -> RunEvent | None:
        """The newest event of a kind."""
        return next((h for h in reversed(self.run_events) if h.kind == kind), None)

    def _open(self, line: dict[str, Any]) -> None:
        """Begin a session: the workers of an earlier controller are gone."""
        if self.sessions and self.members:
            self._stretch(self.sessions[-1].end, 0, training=False)
        self.sessions.append(Session(line["time"], line["time"]))
        self.members, self.outcome, self._has_resumed = (), None, False
        self.standbys.clear()
        self.starting.clear()
        self.quarantined.clear()
        self._draining.clear()
        self._trouble_since = None
        self._standby_report.open(line)
        self.max_workers = line.get("policy", {}).get("max_workers", self.max_workers)
        self.total_steps = line.get("job", {}).get("steps", self.total_steps)

    def _extend_session(self, time: float) -> None:
        if not self.sessions:
            self.sessions.append(Session(time, time))
        self.sessions[-1].end = max(self.sessions[-1].end, time)

    def _add_worker(self, line: dict[str, Any]) -> None:
        worker, node = line["worker"], line["node"]
        if worker in (*self.standbys, *self.members):
            return  # a restarted controller reports its workers again
        self.places[worker] = WorkerPlace(node, line["pid"], line["time"])
        self.starting.discard(worker)
        self.standbys.add(worker)
        self._gone.discard(worker)
        if node in self.quarantined:
            self._draining[worker] = QUARANTINED
        text = f"{worker} is ready on {shortened(node, 16)} (pid {line['pid']})"
        self._note(line, "ready", text, worker=worker)

    def _remove_worker(self, line: dict[str, Any]) -> None:
        """A worker is gone: it left by plan if it was draining and no longer a member."""
        worker, cause = line["worker"], line["cause"]
        if worker in self._gone or self.outcome:
            return
        self._gone.add(worker)
        self.standbys.discard(worker)
        self.starting.discard(worker)
        if worker in self._draining and worker not in self.members:
            cause = self._draining.pop(worker)
            self._note(line, "left", f"{worker} left: {cause}", worker=worker, cause=cause)
            return
        self.num_lost += 1
        if worker in self.members:
            self.members = tuple(member for member in self.members if member != worker)
            self._abort(line["time"])
        self._note(line, "lost", f"{worker} lost: {cause}", worker=worker, cause=cause)

    def _drain(self, line: dict[str, Any]) -> None:
        if line.get("event") == "WorkerDraining":
            worker, cause = line["worker"], line["cause"]
            self._draining[worker] = cause
            text = f"{worker} is draining: {cause}"
            self._note(line, "worker draining", text, worker=worker, cause=cause)
            return
        node = line["node"]
        for worker in (w for w, place in self.places.items() if place.node == node):
            self._draining[worker] = f"node {shortened(node, 16)} is draining"
        notice = duration(max(0.0, line.get("deadline", line["time"]) - line["time"]))
        text = f"node {shortened(node, 16)} is draining: it ends in {notice}"
        self._note(line, "draining", text, shortened(node, 16), node=node)

    def _take_health(self, name: str, line: dict[str, Any]) -> None:
        """Note workers that will leave: stragglers, those of quarantined nodes or of a market."""
        if name == "MarketChosen":
            self._choose_market(line)
            return
        cause = line["cause"]
        if name == "Replaced":
            worker = line["worker"]
            self._draining[worker] = cause
            text = f"{worker} will be replaced: {cause}"
            self._note(line, "straggler", text, worker=worker, cause=cause)
            return
        node, shown = line["node"], shortened(line["node"], 16)
        if name == "NodeQuarantined":
            self.quarantined[node] = line["until"]
            for worker in (w for w, place in self.places.items() if place.node == node):
                self._draining[worker] = QUARANTINED
            text = f"node {shown} is quarantined: {cause}"
            self._note(line, "quarantined", text, shown, node=node)
            return
        self.quarantined.pop(node, None)
        self._draining |= dict.fromkeys(self.starting, f"node {shown} is released from quarantine")
        text = f"node {shown} is released from quarantine: {cause}"
        self._note(line, "used again", text, shown, node=node)

    def _abort(self, time: float) -> None:
        if self._trouble_since is None:
            self._trouble_since = time
        self._stretch(time, len(self.members), training=False)

    def _take_hang(self, name: str, line: dict[str, Any]) -> None:
        """Collect what the workers of a generation that hung report, and note it afterwards."""
        if name == "HangObserved":
            self._hang_reports[line["worker"]] = line
        elif self._hang_reports and name in ("Form", "Waited", "Stopped"):
            text = diagnose(self.ranked, self._hang_reports)
            self._hang_reports.clear()
            self._note(line, "hang", f"hang: {text}", cause=text)

    def _resume(self, line: dict[str, Any]) -> None:
        workers = tuple(line["workers"])
        newcomers = [w for w in workers if w not in self.members] if self._has_resumed else []
        self.recovery_s = None
        if self._trouble_since is not None and self._has_resumed:
            self.recovery_s = line["time"] - self._trouble_since
        self._trouble_since, self._has_resumed = None, True
        self.standbys = (self.standbys | set(self.members)) - set(workers)
        self.members = self.ranked = workers
        self.layout = line["layout"]
        self.generation, self.step = line["generation"], line["step"]
        self.num_joined += len(newcomers)
        for worker in newcomers:
            self._note(line, "joined", f"{worker} joined", worker=worker)
        text = f"generation {self.generation}: {counted(len(workers), 'worker')} ({self.layout})"
        after = f" after {duration(self.recovery_s)}" if self.recovery_s is not None else ""
        text = f"{text} from step {self.step + 1}{after}"
        self._note(line, "resumed", text, short=f"g{self.generation}", value=self.recovery_s)
        if reason := self._standby_report.news(line, self.standbys - self._draining.keys()):
            self._note(line, "standby", reason, "standby", cause=reason)
        self._stretch(line["time"], len(workers), training=True)

    def _take_other(self, name: str, line: dict[str, Any]) -> None:
        """Note lines that do not change the membership."""
        match name:
            case "RolledBack":
                self._roll_back(line)
            case "Warned":
                self.num_not_finite += line["kind"] == "not finite"
                self._note(line, line["kind"], line["text"], f"{line['kind']} at {line['step']}")
            case "Audited" if line["num_replicas"] == 1:
                self._note_no_replicas(line)
            case "Checkpointed":
                step = line["step"]
                self._note(line, "checkpoint", f"checkpoint of step {step}", f"step {step}")
            case "PartFailed":
                self._fail_checkpoint(line, f"checkpoint of step {line['step']} failed")
            case "CheckpointDamaged":
                self._fail_checkpoint(line, "a damaged checkpoint is skipped")
            case "Evaluated":
                self._evaluate(line)
            case "Waited":
                self.phase = f"waiting: {line['reason']}"
                if self.waiting_since is None:
                    self.waiting_since = line["time"]
                kind = "waiting" if self._has_resumed else "starting"
                self._note(line, kind, self.phase, line["reason"])
            case "LayoutAnswered" | "StepTimeCompared":
                self._take_layout(name, line)
            case "ControllerRestarted" | "ControllerRaised" | "ControllerRecovered":
                self._take_controller(name, line)
            case "StopRequested":
                text = f"stop requested: {line['cause']}"
                self._note(line, "stopping", text, cause=line["cause"])
            case "Stopped":
                self._stop(line)

    def _choose_market(self, line: dict[str, Any]) -> None:
        """Note on which market workers are requested; withdrawn requests are no losses."""
        withdrawn, cause = line["withdrawn"], line["cause"]
        never_started = self.starting.intersection(withdrawn)
        self._gone |= never_started
        self.starting -= never_started
        leaving = set(withdrawn) - never_started
        self._draining |= dict.fromkeys(leaving, cause)
        self._note(line, "market", market_text(line, len(leaving)), line["market"])

    def _take_controller(self, name: str, line: dict[str, Any]) -> None:
        """Note what happened to the controller; quarantines last longer by its absence."""
        if name == "ControllerRestarted":
            absence_s = max(0.0, line["time"] - line["stopped_at"])
            self.quarantined = {n: until + absence_s for n, until in self.quarantined.items()}
        kind, text = controller_text(name, line)
        self._note(line, kind, text, cause=line.get("message", ""))

    def _evaluate(self, line: dict[str, Any]) -> None:
        metrics = tuple((name, value) for name, value in line.get("metrics", ()))
        text = evaluation_text(line)
        self._note(line, "evaluated", text, value=line["loss"], metrics=metrics)

    def _take_layout(self, name: str, line: dict[str, Any]) -> None:
        """Note how long steps of a layout take, or the answer to a layout request, unless the run
        has that layout already."""
        if name == "StepTimeCompared":
            self._note(line, "step time", step_time_text(line), line["layout"])
            return
        planned, present, refusal = line["planned"], line["present"], line["refusal"]
        if refusal:
            self._note(line, "refused layout", f"layout refused: {refusal}", cause=refusal)
        elif planned != present:
            text = f"layout {planned} requested" + (f" instead of {present}" if present else "")
            self._note(line, "layout", text, planned)

    def _roll_back(self, line: dict[str, Any]) -> None:
        """Note a rollback to an older step, or to the beginning."""
        before, self.step = line.get("from_step", self.step), line["step"]
        text, cause = rollback_text(before, line), line.get("cause", "")
        self._note(line, "rolled back", text, f"{before} → {self.step}", cause=cause)

    def _note_no_replicas(self, line: dict[str, Any]) -> None:
        """Note once per layout that a requested audit has nothing to compare."""
        if self.layout not in self._reported_without_replicas:
            self._reported_without_replicas.add(self.layout)
            text = f"no audit under {self.layout}: no worker is a replica of another"
            self._note(line, "audit", text, "no replicas")

    def _stop(self, line: dict[str, Any]) -> None:
        self.outcome = line["outcome"]
        reason = line.get("reason") or ""
        text = f"{self.outcome} at step {self.step}" + (f": {reason}" if reason else "")
        self._note(line, "stopped", text, self.outcome, cause=reason)
        self._stretch(line["time"], 0, training=False)
        self.members = ()
        self.starting.clear()

    def _fail_checkpoint(self, line: dict[str, Any], text: str) -> None:
        """Note a failure once, though several workers may report it."""
        failure = (text, line["generation"])
        if failure != self._failed_checkpoint:
            cause = line["cause"]
            self._note(line, "failed checkpoint", f"{text}: {cause}", cause=cause)
        self._failed_checkpoint = failure

    def _note(
        self,
        line: dict[str, Any],
        kind: str,
        text: str,
        short: str = "",
        worker: str = "",
        node: str = "",
        cause: str = "",
        value: float | None = None,
        metrics: tuple[tuple[str, float], ...] = (),
    ) -> None:
        run_event = RunEvent(
            time=line["time"],
            kind=kind,
            step=line["step"] if kind in KINDS_WITH_STEP else self.step,
            generation=self.generation,
            world_size=len(self.members),
            text=text,
            short=short or worker or node,
            worker=worker,
            node=node or (self.places[worker].node if worker in self.places else ""),
            cause=cause,
            value=value,
            metrics=metrics,
        )
        self.run_events.append(run_event)
        if len(self.run_events) > MAX_KEPT:
            kind = self.run_events.pop(0).kind
            self.dropped[kind] = self.dropped.get(kind, 0) + 1

    def _stretch(self, time: float, world_size: int, training: bool) -> None:
        self.stretches.append(Stretch(time, world_size, self.generation, training))
        del self.stretches[:-MAX_KEPT]
