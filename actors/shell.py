"""The controller's shell: one inbox, the core, the journal, and the commands carried out."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.checkpoints import Publisher, find_checkpoints, folder_of
from actors.fleet import Fleet, Survivors
from actors.journal import replay
from actors.lease import Lease
from actors.lines import LineLog, open_lines
from actors.storage import Storage
from actors.watch import Watch
from elastic.commands import (
    Abort,
    AskKeepers,
    Command,
    DropCheckpoints,
    ForgetSnapshots,
    Form,
    LayoutAnswered,
    NodeAvoided,
    NodeUsedAgain,
    Pause,
    Protect,
    PublishCheckpoint,
    RecordStep,
    Relaid,
    Relayout,
    Replaced,
    Resume,
    RolledBack,
    SaveCheckpoint,
    SetAside,
    Settle,
    StartKeeper,
    StartStore,
    StartWorkers,
    StopKeeper,
    Stopped,
    StopWorker,
    Waited,
    Warned,
    WishCheckpoint,
)
from elastic.events import ControllerRestarted, Event, RunOpened, Woke, WorkerReady
from elastic.votes import StepRecord
from elastic.wire import FORMAT, command_line, event_line, state_line

SILENT = (RecordStep,)
"""Commands that need no journal line: their event tells the same."""

JOURNAL, METRICS = "journal.jsonl", "metrics.jsonl"
LOOK_EVERY_S = 2.0


class Shell:
    """Drives one run to its end; `post` may be called from any thread."""

    def __init__(
        self,
        run: Storage,
        lease: Lease,
        due: tuple[tuple[int, Event], ...] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`due` are events to be posted once their step has committed."""
        self._due = list(due)
        self._run = run
        self._lease = lease
        self._clock = clock
        self._inbox: queue.Queue[Event] = queue.Queue()
        self._before = replay(LineLog(run, JOURNAL))
        self._core = self._before.core
        self._journal = open_lines(LineLog(run, JOURNAL))
        self._metrics = open_lines(LineLog(run, METRICS))
        self._now = self._before.now
        self._ahead: set[tuple[int, int]] = set()
        """Generation and step of lines of metrics that the journal does not account for."""
        self._listeners: list[queue.Queue[Command]] = []
        self.outcome: Stopped | None = None
        self.opened = threading.Event()
        """What is posted from now on is of this session of the run."""
        self.ended = threading.Event()
        """Nothing is served any more, whatever the reason."""

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    @property
    def trouble(self) -> str:
        """Why storage does not take the run's lines at present, or empty."""
        return self._journal.trouble or self._metrics.trouble

    @contextmanager
    def listening(self) -> Iterator[queue.Queue[Command]]:
        """Each command from now on, once it is durable and under way; for any thread."""
        told: queue.Queue[Command] = queue.Queue()
        self._listeners.append(told)
        try:
            yield told
        finally:
            self._listeners.remove(told)

    def run(self, fleet: Fleet, opening: RunOpened, survivors: Survivors | None = None) -> Stopped:
        """Open the run, or go on with what a controller of the same actor has left alive, and serve
        it until it has stopped. `opening.saved` is found here."""
        self._fleet = fleet
        self._complete_lines()
        watch = Watch(fleet, self.post, self._core.state.generation)
        self._publisher = Publisher(self._run, self._lease, self.post)
        self._lease.keep()
        if survivors and self._goes_on(survivors):
            self._go_on(survivors, watch)
        else:
            if survivors:
                survivors.clear_away()
            self._open(opening)
        self.opened.set()
        try:
            while self.outcome is None:
                event = self._next_event()
                watch.note(event)
                self._serve(event)
        finally:
            self.ended.set()
            watch.close()
            fleet.close()
            self._publisher.close()
            self._lease.let_go()
            self._journal.close()
            self._metrics.close()
        return self.outcome

    def _open(self, opening: RunOpened) -> None:
        if self._is_heir() and self._before.stopped:
            self.outcome = self._before.stopped  # that controller died before it could tell
            return
        found = find_checkpoints(self._run)
        for complaint in found.complaints:
            self._journal.write({"time": self._clock(), "warning": complaint, "format": FORMAT})
        self._publisher.order(DropCheckpoints(found.unfinished))
        self.post(dataclasses.replace(opening, incarnation=self._lease.epoch, saved=found.whole))

    def _is_heir(self) -> bool:
        """Whether it was the same actor that wrote the journal's last lines."""
        return self._lease.since <= self._core.state.incarnation

    def _goes_on(self, survivors: Survivors) -> bool:
        """Whether what lives is what the journal tells of: an object store's may lack the last
        second, and with it a generation."""
        if not self._is_heir() or self._before.stopped:
            return False
        return survivors.newest_generation() <= self._core.state.generation

    def _go_on(self, survivors: Survivors, watch: Watch) -> None:
        """Take over what lives, and have done what may not have been done."""
        state = self._core.state
        self.post(ControllerRestarted(self._lease.epoch, self._before.now))
        for worker in sorted(state.warm):
            seat = state.seats[worker]
            watch.note(WorkerReady(worker, seat.node, seat.pid))
        survivors.attach(state)
        for told in self._before.again():
            self._carry_out(self._still_there(told) if isinstance(told, DropCheckpoints) else told)

    def _still_there(self, drop: DropCheckpoints) -> DropCheckpoints:
        there = (key for key in drop.dropped if self._run.files(folder_of(*key)))
        return DropCheckpoints(tuple(there))

    def _complete_lines(self) -> None:
        """Whoever wrote last may have died between an event's line and those that follow it. On an
        object store the metrics may also be ahead of the journal."""
        for command in self._before.untold():
            self._tell(self._before.now, command)
        lines = LineLog(self._run, METRICS).lines()
        there = {(line["generation"], line["step"]) for line in lines}
        for told in self._before.records:
            if (told.record.generation, told.record.step) not in there:
                self._metrics.write(dataclasses.asdict(told.record))
        known = self._core.state.committed_step
        self._ahead = {(generation, step) for generation, step in there if step > known}

    def _tell(self, now: float, command: Command) -> None:
        self._journal.write(command_line(now, command, self._core.state))
        if isinstance(command, Resume):
            self._journal.write(state_line(now, self._core.state))

    def _next_event(self) -> Event:
        while True:
            deadline = self._core.next_deadline()
            now = max(self._now, self._clock())
            if deadline is not None and deadline <= now and self._inbox.empty():
                return Woke()
            patience_s = LOOK_EVERY_S if deadline is None else deadline - now
            try:
                return self._inbox.get(timeout=min(max(patience_s, 0.0), LOOK_EVERY_S))
            except queue.Empty:
                self._lease.check()

    def _serve(self, event: Event) -> None:
        """One event: decide, make the decision durable, carry it out."""
        self._now = max(self._now, self._clock())
        commands = self._core.step(self._now, event)
        self._lease.check()
        self._journal.write(event_line(self._now, event, self._core.state))
        told = [command for command in commands if not isinstance(command, SILENT)]
        for line in told:
            self._tell(self._now, line)
        if told:
            self._journal.make_durable()
        for command in commands:
            self._carry_out(command)
            for listener in tuple(self._listeners):
                listener.put(command)

    def _carry_out(self, command: Command) -> None:
        fleet = self._fleet
        match command:
            case StartStore():
                fleet.start_store()
            case StartWorkers():
                fleet.start_workers(command.workers, command.avoided)
            case StopWorker():
                fleet.stop_worker(command.worker)
            case Form():
                fleet.send(command.plan.participants, command)
            case Resume():
                fleet.send((*command.workers, *command.released), command)
            case (
                Abort()
                | Settle()
                | Relayout()
                | Pause()
                | Protect()
                | WishCheckpoint()
                | SaveCheckpoint()
            ):
                fleet.send(command.workers, command)
            case StartKeeper() | StopKeeper() | AskKeepers() | ForgetSnapshots():
                self._reach_keepers(command)
            case PublishCheckpoint() | DropCheckpoints() | SetAside():
                self._publisher.order(command)
            case RecordStep():
                self._record(command.record)
            case Stopped():
                self.outcome = command
            case Relaid() | RolledBack() | Warned() | Waited() | LayoutAnswered():
                pass  # telling it was all there was to do
            case Replaced() | NodeAvoided() | NodeUsedAgain():
                pass  # likewise

    def _reach_keepers(
        self, command: StartKeeper | StopKeeper | AskKeepers | ForgetSnapshots
    ) -> None:
        match command:
            case StartKeeper():
                self._fleet.start_keeper(command.node)
            case StopKeeper():
                self._fleet.stop_keeper(command.node)
            case AskKeepers():
                self._fleet.ask_keepers(command.nodes, command.generation)
            case ForgetSnapshots():
                self._fleet.forget_snapshots(command.nodes, command.generation)

    def _record(self, record: StepRecord) -> None:
        """A step's line, and what was to be told once it has committed."""
        if (record.generation, record.step) not in self._ahead:
            self._metrics.write(dataclasses.asdict(record))
        for entry in [entry for entry in self._due if entry[0] <= record.step]:
            self._due.remove(entry)
            self.post(entry[1])
