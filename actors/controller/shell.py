"""The controller's shell: one inbox, the core, a durable journal, the execution of commands."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from actors.controller.compaction import Compactor
from actors.controller.fleet import Fleet, Survivors, dispatch
from actors.controller.guard import GuardedCore
from actors.controller.journal import is_step_line, newest_rows, open_journal, replay_of
from actors.controller.publisher import Publisher
from actors.controller.run_clock import Clock, RunClock
from actors.controller.start_guard import FIRST_PATIENCE_S, STORAGE_PATIENCE_S, StartGuard
from actors.controller.storage_outage import close_logs, waiting_for_storage, with_shortfall
from actors.controller.watch import Watch
from actors.storage.checkpoint_files import find_checkpoints
from actors.storage.file_names import JOURNAL, METRICS, SYSTEM
from actors.storage.lease import Lease
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import open_lines
from actors.storage.storage import DiskStorage, Storage
from elastic.controller.controller_errors import MAX_IN_A_ROW
from elastic.protocol.commands import (
    Command,
    DropCheckpoints,
    LayoutAnswered,
    NodeQuarantined,
    NodeReleased,
    PublishCheckpoint,
    RecordStep,
    Replaced,
    Resharded,
    Resume,
    RolledBack,
    SetAside,
    Stopped,
    Waited,
    Warned,
)
from elastic.protocol.controller_events import ControllerRaised, ControllerRestarted
from elastic.protocol.events import Checkpointed, Event, PartFailed, RunOpened, Woke, WorkerReady
from elastic.protocol.votes import StepRecord
from elastic.protocol.wire import FORMAT, command_line
from elastic.replay.journal_lines import SILENT, JournalWriter

LOOK_EVERY_S = 2.0


class Shell:
    """Drives one run to its end; `post` may be called from any thread."""

    def __init__(
        self,
        run: Storage,
        lease: Lease,
        due: tuple[tuple[int, Event], ...] = (),
        wall: Clock = time.time,
    ) -> None:
        """`due` are events to post once their step has committed."""
        self._due = list(due)
        self._run = run
        self._lease = lease
        self._inbox: queue.Queue[Event] = queue.Queue()
        self._journal = open_journal(LineLog(run, JOURNAL), lease)
        self._metrics = open_lines(LineLog(run, METRICS), lease.epoch, lease.look)
        try:
            self._before = replay_of(lease, LineLog(run, JOURNAL))
        except Exception:
            close_logs((self._journal, self._metrics), patience_s=0.0)
            raise
        self._core = self._before.core
        self._writer = JournalWriter(
            self._before.unfinished, self._before.records, self._before.num_events
        )
        self._now = self._before.now
        self._guarded = GuardedCore(self._core, self._serve)
        self._clock = RunClock(self._before.now, wall)
        patience_s = STORAGE_PATIENCE_S if self._is_heir() else FIRST_PATIENCE_S
        counted = self._core.state.errors.counts.keys()
        self._start_guard = StartGuard(run.url, patience_s, counted)
        self._ahead: set[tuple[int, int]] = set()
        """Generation and step of the metrics lines that the journal does not know of."""
        self._listeners: list[queue.Queue[Command]] = []
        self._unsaved: PartFailed | None = None
        """The newest checkpoint whose writing failed, until a later one succeeds."""
        self.outcome: Stopped | None = None
        self.opened = threading.Event()
        """Set once posted events belong to this session of the run."""
        self.ended = threading.Event()
        """Set once the shell processes no more events, for whatever reason."""

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    @property
    def trouble(self) -> str:
        """What currently waits for storage, and why; empty if nothing does."""
        if self._start_guard.trouble:
            return self._start_guard.trouble
        return waiting_for_storage(self._unsaved, {JOURNAL: self._journal, METRICS: self._metrics})

    @property
    def committed_step(self) -> int:
        """The newest step that is known to have committed."""
        return self._core.state.committed_step

    @contextmanager
    def listening(self) -> Iterator[queue.Queue[Command]]:
        """Receive each command from now on, once it is durable and under way; for any thread."""
        commands: queue.Queue[Command] = queue.Queue()
        self._listeners.append(commands)
        try:
            yield commands
        finally:
            self._listeners.remove(commands)

    def run(self, fleet: Fleet, opening: RunOpened, survivors: Survivors | None = None) -> Stopped:
        """Open the run, or take over what an earlier controller of the same actor left alive, and
        process events until the run has stopped. This fills in `opening.saved`."""
        self._fleet = fleet
        state, silence_s = self._core.state, opening.policy.silence_timeout_s
        members, step_s = state.live.members(), state.steps.median_s()
        watch = Watch(fleet, self.post, silence_s, state.generation, members, step_s)
        self._watch = watch
        self._publisher = Publisher(self._run, self._lease, self.post)
        self._lease.keep()
        self._compactor = self._open_compactor()
        try:
            self._start(opening, survivors, watch)
            self.opened.set()
            while self.outcome is None:
                if (forced := self._guarded.forced_end(self._now)) is not None:
                    self._serve_forced(forced)
                    break
                event = self._guarded.next(self._next_event)
                self._guarded.attempt("watch", partial(watch.note, event))
                self._serve(event)
        finally:
            self.ended.set()
            unwritten = self._close(watch)
        assert self.outcome is not None, "the loop ends with an outcome"
        return with_shortfall(self.outcome, unwritten)

    def _start(self, opening: RunOpened, survivors: Survivors | None, watch: Watch) -> None:
        """Open the run or take it over, guarded like an event. Raises `RunRefused`."""
        attempt, missing_lines = self._start_guard.attempt, deque[dict[str, Any]]()
        attempt("journal", lambda: missing_lines.extend(self._missing_lines()))
        attempt("journal", partial(self._write_all, missing_lines))
        attempt("metrics", self._complete_metrics)
        if survivors and self._can_take_over(survivors):
            self._take_over(survivors, watch)
        else:
            if survivors:
                attempt("survivors", survivors.clear_away)
            if not attempt(RunOpened.__name__, partial(self._open, opening)):
                self._give_up_opening()
        for event in self._start_guard.events:
            self.post(event)

    def _give_up_opening(self) -> None:
        """End the run: this session has nothing yet that could be saved."""
        raised = [e for e in self._start_guard.events if isinstance(e, ControllerRaised)][-1]
        reason = f"the controller failed {MAX_IN_A_ROW} times in a row at {raised.place}"
        step = self.committed_step
        stopped = Stopped("failed", step, f"{reason}: {raised.message}", raised.traceback)
        self._serve_forced(stopped)

    def _close(self, watch: Watch) -> str:
        """End everything, whatever raises on the way; return which lines were not written."""
        unwritten: list[str] = []
        with ExitStack() as closing:
            closing.callback(self._lease.let_go)
            closing.callback(lambda: unwritten.append(close_logs((self._journal, self._metrics))))
            if self._compactor:
                closing.callback(self._compactor.close)
            closing.callback(self._publisher.close)
            closing.callback(self._fleet.close)
            closing.callback(watch.close)
        return "".join(unwritten)

    def _open_compactor(self) -> Compactor | None:
        """Start compaction if the run is on an object store, where a log is many objects."""
        if isinstance(self._run, DiskStorage):
            return None
        others = LineLog(self._run, METRICS), LineLog(self._run, SYSTEM)
        return Compactor(LineLog(self._run, JOURNAL), others, self._lease.look)

    def _open(self, opening: RunOpened) -> None:
        if self._is_heir() and self._before.stopped:
            self.outcome = self._before.stopped  # that controller died before it reported the end
            return
        checkpoints = find_checkpoints(self._run)
        newest = LineLog(self._run, METRICS).last_rows(1)
        generations = [row["generation"] for row in newest if is_step_line(row)]
        for complaint in checkpoints.complaints:
            self._journal.write({"time": self._clock.now(), "warning": complaint, "format": FORMAT})
        self.post(
            dataclasses.replace(
                opening,
                incarnation=self._lease.epoch,
                saved=checkpoints.whole,
                newest_generation=max([checkpoints.newest_generation, *generations]),
            )
        )
        # The publisher's answer belongs to this session, so it must not come before `RunOpened`.
        self._publisher.order(DropCheckpoints(checkpoints.unfinished))

    def _is_heir(self) -> bool:
        """Whether a controller of the same actor wrote the journal's last lines."""
        return self._lease.since <= self._core.state.incarnation

    def _can_take_over(self, survivors: Survivors) -> bool:
        """Whether the survivors match the journal: on an object store it may lack the last second,
        and with it a generation."""
        if not self._is_heir() or self._before.stopped:
            return False
        generations: list[int] = []

        def query() -> None:
            generations.append(survivors.newest_generation())

        if not self._start_guard.attempt("survivors", query):
            return True  # the failure ends the run, and the survivors' state must be saved
        return generations[0] <= self._core.state.generation

    def _take_over(self, survivors: Survivors, watch: Watch) -> None:
        """Take over the survivors, and repeat the commands that may not have been executed."""
        state, again = self._core.state, self._before.again()
        attempt = self._start_guard.attempt
        self.post(ControllerRestarted(self._lease.epoch, self._before.now))
        for worker in sorted(state.membership.warm):
            record = state.membership.records[worker]
            watch.note(WorkerReady(worker, record.node, record.pid))
        attempt("survivors", partial(survivors.attach, state))
        for command in again:
            attempt(type(command).__name__, partial(self._execute, command))

    def _missing_lines(self) -> list[dict[str, Any]]:
        """The lines of the last event's commands, if the last writer died before it wrote them."""
        commands, now = self._before.untold(), self._before.now
        lines = [command_line(now, command, self._core.state) for command in commands]
        if any(isinstance(command, Resume) for command in commands):
            lines.append(self._writer.full_state(now, self._core.state))
        return lines

    def _complete_metrics(self) -> None:
        """Write the metrics lines that only the journal has, and note those that it lacks."""
        rows = newest_rows(LineLog(self._run, METRICS), self._before)
        written = {(row["generation"], row["step"]) for row in rows}
        records = self._before.records
        while records:  # each once, even if one raises and this is repeated
            record = records[0].record
            if (record.generation, record.step) not in written:
                self._metrics.write(dataclasses.asdict(record))
            records.popleft()
        known_step = self._core.state.committed_step
        generation = self._core.state.generation
        self._ahead = {key for key in written if key[0] <= generation and key[1] > known_step}

    def _next_event(self) -> Event:
        while True:
            deadline = self._core.next_deadline()
            now = self._clock.now()
            if deadline is not None and deadline <= now and self._inbox.empty():
                return Woke()
            patience_s = LOOK_EVERY_S if deadline is None else deadline - now
            try:
                return self._inbox.get(timeout=min(max(patience_s, 0.0), LOOK_EVERY_S))
            except queue.Empty:
                self._lease.check()
                self._journal.flush()
                self._metrics.flush()
                self._write_due(self._clock.now())
                if self._guarded.is_failing:
                    return Woke()

    def _serve(self, event: Event) -> None:
        """Process an event: decide, make the decision durable, execute it. What raises is retried
        and given up after the third time; then the run is saved and ends."""
        self._now, event = self._clock.now(), self._clock.on_this_clock(event)
        guarded, place = self._guarded, type(event).__name__
        self._note_storage(event)
        self._write_lines(place, self._writer.before(event, self._core.state, self._num_waiting()))
        commands = guarded.step(self._now, event)
        if commands is None:
            self.post(Woke())  # the core goes on without the event
            return
        self._write_event(place, event, commands)
        for command in commands:
            is_done = guarded.attempt(type(command).__name__, partial(self._execute, command))
            if isinstance(command, Stopped) and not is_done:
                self.outcome = command
            for listener in tuple(self._listeners):
                listener.put(command)
        guarded.note_success(place)
        self._write_due(self._now)

    def _write_event(self, place: str, event: Event, commands: list[Command]) -> None:
        """Write the lines of an event and its commands; durable if there are any commands."""
        now, state, lines = self._now, self._core.state, deque[dict[str, Any]]()

        def compose() -> None:
            lines.extend(self._writer.after(now, event, commands, state, self._num_waiting()))

        write_all = partial(self._write_all, lines)
        actions: list[Callable[[], None]] = [self._lease.check, compose, write_all]
        if any(not isinstance(command, SILENT) for command in commands):
            actions.append(self._journal.make_durable)
        self._guarded.write(place, lambda: actions, self._write_state)

    def _write_due(self, now: float) -> None:
        """Write the lines that the writer has held back for long enough."""
        if self.outcome is None:
            lines = self._writer.due(now, self._core.state, self._num_waiting())
            if lines:
                self._metrics.make_durable()  # a full state leaves the steps to the metrics
            self._write_lines("journal", lines)

    def _write_lines(self, place: str, lines: list[dict[str, Any]]) -> None:
        if lines:
            write_all = partial(self._write_all, deque(lines))
            actions: list[Callable[[], None]] = [self._lease.check, write_all]
            self._guarded.write(place, lambda: actions, self._write_state)

    def _write_all(self, lines: deque[dict[str, Any]]) -> None:
        """Write each line once, even if one raises and this is repeated."""
        while lines:
            self._journal.write(lines[0])
            lines.popleft()

    def _write_state(self) -> None:
        self._journal.write(
            self._writer.full_state(self._now, self._core.state, self._num_waiting())
        )

    def _num_waiting(self) -> int:
        return self._metrics.num_waiting

    def _serve_forced(self, stopped: Stopped) -> None:
        """End the run without the core, which has not ended it in time."""
        state = self._core.state
        lines = self._writer.before(Woke(), state, self._num_waiting())
        self._write_lines("Stopped", [*lines, command_line(self._now, stopped, state)])
        self.outcome = stopped
        for listener in tuple(self._listeners):
            listener.put(stopped)

    def _note_storage(self, event: Event) -> None:
        if isinstance(event, PartFailed):
            self._unsaved = event
        elif isinstance(event, Checkpointed):
            self._unsaved = None

    def _execute(self, command: Command) -> None:
        match command:
            case PublishCheckpoint() | DropCheckpoints() | SetAside():
                self._publisher.order(command)
            case RecordStep():
                self._record(command.record)
            case Stopped():
                self.outcome = command
            case Resharded() | RolledBack() | Warned() | Waited() | LayoutAnswered():
                pass  # the journal line is all that it needs
            case Replaced() | NodeQuarantined() | NodeReleased():
                pass  # the same
            case _:
                if isinstance(command, Resume):
                    self._watch.note_members(command.workers)
                dispatch(self._fleet, command)

    def _record(self, record: StepRecord) -> None:
        """Write a step's metrics line, and post the events that were due at it."""
        key = (record.generation, record.step)
        if key in self._ahead:
            self._ahead.discard(key)
        else:
            self._metrics.write(dataclasses.asdict(record))
        for entry in [entry for entry in self._due if entry[0] <= record.step]:
            self._due.remove(entry)
            self.post(entry[1])
