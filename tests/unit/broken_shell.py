"""A shell and a core that raise at a chosen place, and two workers that obey them."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from users_policy import users_policy

from actors.controller.shell import Shell
from actors.controller.shell_parts import ShellParts
from actors.storage.checkpoint_files import find_checkpoints, folder_of
from actors.storage.lease import claim
from actors.storage.storage import DiskStorage
from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol import commands as all_commands
from elastic.protocol import notes
from elastic.protocol.commands import (
    Abort,
    Command,
    Form,
    Order,
    Pause,
    RequestCheckpoint,
    Reshard,
    Resume,
    RollForward,
    SaveCheckpoint,
    Stopped,
)
from elastic.protocol.controller_events import (
    CheckpointsRemoved,
    ControllerRecovered,
    ControllerRestarted,
    WorkerAnswered,
    WorkerPlaced,
    WorkersStalled,
)
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import (
    Audited,
    CheckpointDamaged,
    ComputeTimed,
    Evaluated,
    Event,
    GroupFormed,
    HangObserved,
    LayoutRequested,
    NodeAtRisk,
    NodeDraining,
    PartFailed,
    PartFile,
    PartWritten,
    Paused,
    Progressed,
    Quiesced,
    RolledForward,
    RunOpened,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreLost,
    StoreReady,
    Woke,
    WorkerDraining,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
    WorkerSuspected,
)
from elastic.protocol.snapshot_events import (
    SnapshotServerLost,
    SnapshotServerReady,
    SnapshotServerReported,
    SnapshotServerSuspected,
    SnapshotTimed,
)
from elastic.protocol.step_records import RecordsSent
from elastic.protocol.votes import StepRecord, Vote
from elastic.reshard.snapshot_placement import SnapshotServer

NUM_STEPS = 60
STEP_S, EVENTFUL_STEP = 0.01, 20
POLICY = users_policy(
    2,
    2,
    save_timeout_s=2.0,
    collective_timeout_s=1.0,
    hang_timeout_s=1.0,
    form_timeout_s=1.0,
    reshard_timeout_s=1.0,
    growth_wait_s=0.01,
    restart_backoff_s=0.01,
)
VOTE = Vote(1, 1.0, 1, 1.0, 2)
RECORD = StepRecord(0.0, 1, 1, 2, 1.0, 1, 0.1, 1.0, 0.001, skipped=False)

SAMPLES: list[Event] = [
    ControllerRestarted(1, 0.0),
    ControllerRecovered("Woke"),
    StoreLost("it died"),
    WorkerLost("w9", "killed"),
    *(WorkerPlaced("w9", "node9"), WorkerSuspected("w9", "silent")),
    WorkerDraining("w9", "requested"),
    NodeDraining("node9", 1e12),
    NodeAtRisk("node9", "a notice"),
    SnapshotServerReady(SnapshotServer("node9", "", "socket", "host", 1)),
    SnapshotServerSuspected("node9", "silent"),
    SnapshotServerLost("node9", "killed"),
    SnapshotServerReported("node9", 1, ()),
    SnapshotTimed("w9", 1, 0.5),
    ComputeTimed(1, 1, (1.0, 1.0)),
    Evaluated(1, 10, 1.0),
    Audited(1, 10, 2),
    Quiesced("w9", 1, 1),
    HangObserved("w9", 1, (), ""),
    RolledForward("w9", 1, RECORD),
    RecordsSent("w9", 1, ()),
    WorkerRaised("w9", 1, "program", "an error"),
    CheckpointsRemoved(((99, 1),)),
    WorkerAnswered("w9"),
    WorkersStalled(1, ("w9",)),
    StopRequested("enough"),
    PartFailed("w9", 1, 1, "no space left"),
    CheckpointDamaged("w9", 1, "nowhere", "a flipped bit"),
    LayoutRequested("request", TargetLayout.parse("dp=2")),
    Progressed(1),
    Woke(),
]
"""An event of each kind that does not occur by itself; they change next to nothing."""


class Broken(Exception):
    """The exception that a broken handler raises."""


class BrokenCore(Core):
    """Raises at one kind of event, half-way through: the state has already changed."""

    kind = ""
    num_left = 0
    kind_type: type = object

    def step(self, now: float, event: Event) -> list[Command]:
        commands = super().step(now, event)
        if type(event).__name__ == self.kind and self.num_left:
            self.num_left -= 1
            self.state.committed_step += 1000
            self.state.membership.records.clear()
            raise Broken(f"at {self.kind}")
        return commands


class BrokenShell(Shell):
    """Raises when it executes one kind of command, or at one of its own actions."""

    kind = ""
    num_left = 0
    error: type[Exception] = Broken
    extra: list[Command]

    def _missing_lines(self) -> list[dict[str, Any]]:
        self.break_at("missing lines")
        return super()._missing_lines()

    def _complete_metrics(self) -> None:
        self.break_at("missing metrics")
        super()._complete_metrics()

    def _open(self, opening: RunOpened) -> None:
        self.break_at("opening")
        super()._open(opening)

    def _execute(self, command: Command) -> None:
        self.break_at(type(command).__name__)
        super()._execute(command)

    def _write_all(self, lines: deque[dict[str, Any]]) -> None:
        if any("command" in line for line in lines):
            self.break_at("journal")
        super()._write_all(lines)

    def _next_event(self) -> Event:
        event = super()._next_event()
        if self.kind == "next event" and self.num_left:
            self.post(event)
        self.break_at("next event")
        return event

    def break_at(self, kind: str) -> None:
        if kind == self.kind and self.num_left:
            self.num_left -= 1
            raise self.error(f"at {kind}")


class TrainingFleet:
    """Two workers that train on a thread, vote, save their parts and unwind, as real ones do."""

    def __init__(self, folder: Path, samples: Sequence[Event], num_steps: int) -> None:
        self._num_steps = num_steps
        self.shell: BrokenShell
        self.was_cleared = False
        self._run = DiskStorage(folder)
        self._samples = list(samples)
        self._lock = threading.Lock()
        self._step = self._generation = 0
        self._is_save_requested = self._is_pause_requested = self._closed = False
        self._training: threading.Thread | None = None
        self._stop = threading.Event()

    def start_store(self) -> None:
        self.shell.post(StoreReady("host", 1))

    def start_workers(self, command: all_commands.StartWorkers) -> None:
        for worker in command.workers:
            self.shell.post(WorkerReady(worker, "node", 1))

    def stop_worker(self, worker: str) -> None:
        self.shell.post(WorkerLost(worker, "killed"))

    def newest_generation(self) -> int:
        self.shell.break_at("newest generation")
        return 0

    def attach(self, state: ControllerState) -> None:
        """The workers have trained on."""
        self.shell.break_at("attaching")
        self._begin(state.live.members(), state.generation, state.committed_step)

    def end_survivors(self) -> None:
        self.shell.break_at("clearing away")
        self.was_cleared = True

    def send(self, workers: Iterable[str], order: Order) -> None:
        workers = tuple(workers)
        match order:
            case Form():
                self._post(GroupFormed(worker, order.generation) for worker in workers)
            case Reshard():
                self._post(StateReady(w, order.generation, 0, 0, 0.0, 1, 1, 2) for w in workers)
            case Resume():
                if order.generation > self._generation:  # else the order is repeated
                    self._begin(workers, order.generation, order.step)
            case Pause():
                self._is_pause_requested = True
            case RequestCheckpoint():
                self._is_save_requested = True
            case Abort():
                self._halt()
                vote = Vote(self._step, 1.0, 1, 1.0, 2) if self._step else None
                own = replace(RECORD, generation=self._generation)
                records = tuple(replace(own, step=step) for step in range(1, self._step + 1))
                report = (order.generation, self._step, vote, False, False, records)
                self._post(Quiesced(worker, *report) for worker in workers)
            case RollForward():
                self._post(RolledForward(worker, order.generation, RECORD) for worker in workers)
            case SaveCheckpoint():
                self._save(workers, order.generation, order.step)

    def _begin(self, workers: tuple[str, ...], generation: int, step: int) -> None:
        self._halt()
        self._generation, self._step = generation, step
        self._is_pause_requested = self._is_save_requested = False
        self._stop = threading.Event()
        self._training = threading.Thread(target=self._train, args=(workers,))
        self._training.start()

    def _train(self, workers: tuple[str, ...]) -> None:
        while self._step < self._num_steps:
            if self._stop.wait(STEP_S):
                return
            self._step += 1
            step, generation = self._step, self._generation
            saves, self._is_save_requested = self._is_save_requested, False
            pauses = self._is_pause_requested
            record = replace(RECORD, step=step, generation=generation)
            vote = Vote(step, 1.0, 1, 1.0, 2, num_pause_requests=pauses, num_save_requests=saves)
            self.shell.post(StepCommitted(generation, record, vote))
            if saves:
                self._save(workers, generation, step)
            if step == EVENTFUL_STEP:
                self._post(self._samples)
            if pauses:
                break
        self._post(Paused(worker, self._generation, self._step) for worker in workers)

    def _save(self, workers: tuple[str, ...], generation: int, step: int) -> None:
        checkpoint = self._run.at(folder_of(step, generation))
        for worker in workers:
            checkpoint.write(worker, b"part")
            self.shell.post(PartWritten(worker, generation, step, PartFile(worker, 4, 1)))

    def _halt(self) -> None:
        self._stop.set()
        if self._training is not None:
            self._training.join()

    def _post(self, events: Iterable[Event]) -> None:
        for event in events:
            self.shell.post(event)

    def start_snapshot_server(self, node: str) -> None:
        pass

    def stop_snapshot_server(self, node: str) -> None:
        pass

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        pass

    def forget_snapshots(self, nodes: Sequence[str], generation: int, kept_generation: int) -> None:
        pass

    def probe(self, worker: str) -> Future[int]:
        answer: Future[int] = Future()
        answer.set_result(self._step)
        return answer

    def probe_snapshot_server(self, node: str) -> Future[None]:
        return Future()

    def close(self) -> None:
        self._halt()


def run_shell(
    folder: Path,
    install_fault: Callable[[BrokenShell, BrokenCore], None],
    samples: Sequence[Event] = (),
    extra: Sequence[Command] = (),
    steps: int = NUM_STEPS,
    actor: str = "actor",
    may_survive: bool = False,
) -> Stopped:
    """Run a shell to its end; with `may_survive`, the workers of a dead controller train on."""
    fleet = TrainingFleet(folder, samples, steps)
    run = DiskStorage(folder)
    lease = claim(run, actor=actor)
    parts = ShellParts(make_core=BrokenCore, sleep=lambda seconds: time.sleep(seconds / 10))
    shell = BrokenShell(run, lease, parts=parts)
    core = shell._core
    assert isinstance(core, BrokenCore)
    fleet.shell = shell
    install_fault(shell, core)
    pending = list(extra)
    write_event = shell._write_event

    def write_with_pending(place: str, event: Event, commands: list[Command]) -> None:
        if isinstance(event, StepCommitted) and event.record.step == EVENTFUL_STEP and pending:
            commands += pending
            pending.clear()
        write_event(place, event, commands)

    shell._write_event = write_with_pending  # type: ignore[method-assign]
    guard = threading.Timer(30.0, lambda: shell.post(None))  # type: ignore[arg-type]
    guard.start()
    try:
        opening = RunOpened(0, POLICY, TargetLayout.parse("dp=2", 2), Job(8, steps=steps))
        return shell.run(fleet, opening, fleet if may_survive else None)
    finally:
        guard.cancel()
        lease.release()


def read_journal(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    return [line for line in lines if name in (line.get("event"), line.get("command"))]


def saved_steps(folder: Path) -> list[int]:
    return [saved.step for saved in find_checkpoints(DiskStorage(folder)).whole]


def extra_commands() -> list[Command]:
    """One command of each kind that an undisturbed run does not issue; they have no effect."""
    return [
        *(all_commands.StartSnapshotServer("node9"), all_commands.StopSnapshotServer("node9", "")),
        all_commands.StartSnapshots(1, (), ()),
        all_commands.QuerySnapshotServers(1, ()),
        all_commands.ForgetSnapshots(1, ()),
        all_commands.RollForward(1, (), VOTE),
        all_commands.SetAside(1, 99),
        all_commands.SendRecords(1, (), 0),
        *(notes.RolledBack(1, 1, 1, "live"), notes.Warned(1, 1, "notice", "text")),
        *(notes.Replaced("w9", "slow"), notes.StepTimeCompared(1, "dp=2", 1.0, 1.0)),
        *(notes.NodeQuarantined("node9", 0.0, "crashes"), notes.NodeReleased("node9", "over")),
        *(notes.LayoutAnswered(1, "request", "dp=2", "dp=2"), notes.MarketChosen("spot", 1, "")),
        all_commands.DropCheckpoints(()),
        all_commands.RequestCheckpoint(1, ("w0", "w1"), EVENTFUL_STEP),
        all_commands.StopWorker("w9", "unused"),
    ]
