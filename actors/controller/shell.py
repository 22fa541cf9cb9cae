"""The controller's shell: one inbox, the core, the journal, and the commands carried out."""

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
from actors.controller.fleet import Fleet, Survivors, pass_on
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
        """`due` are events to be posted once their step has committed."""
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
        counted = self._core.state.controller_errors.keys()
        self._start_guard = StartGuard(run.url, patience_s, counted)
        self._ahead: set[tuple[int, int]] = set()
        """Generation and step of lines of metrics that the journal does not account for."""
        self._listeners: list[queue.Queue[Command]] = []
        self._unsaved: PartFailed | None = None
        """The newest checkpoint that could not be written, until one can."""
        self.outcome: Stopped | None = None
        self.opened = threading.Event()
        """What is posted from now on is of this session of the run."""
        self.ended = threading.Event()
        """Nothing is served any more, whatever the reason."""

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    @property
    def trouble(self) -> str:
        """What waits for storage at present, and why; empty if nothing does."""
        if self._start_guard.trouble:
            return self._start_guard.trouble
        return waiting_for_storage(self._unsaved, {JOURNAL: self._journal, METRICS: self._metrics})

    @property
    def committed_step(self) -> int:
        """The newest step that is known to have committed."""
        return self._core.state.committed_step

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
        state, silence_s = self._core.state, opening.policy.silence_timeout_s
        members, step_s = state.members(), state.median_step_s()
        watch = Watch(fleet, self.post, state.generation, silence_s, members, step_s)
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
        """Whatever raises on the way is guarded as an event is. Raises `RunRefused`."""
        attempt, lacking = self._start_guard.attempt, deque[dict[str, Any]]()
        attempt("journal", lambda: lacking.extend(self._lacking_lines()))
        attempt("journal", partial(self._write_all, lacking))
        attempt("metrics", self._complete_metrics)
        if survivors and self._goes_on(survivors):
            self._go_on(survivors, watch)
        else:
            if survivors:
                attempt("survivors", survivors.clear_away)
            if not attempt(RunOpened.__name__, partial(self._open, opening)):
                self._give_up_opening()
        for event in self._start_guard.events:
            self.post(event)

    def _give_up_opening(self) -> None:
        """Nothing of this session of the run is there yet that could be saved."""
        raised = [e for e in self._start_guard.events if isinstance(e, ControllerRaised)][-1]
        reason = f"the controller failed {MAX_IN_A_ROW} times in a row at {raised.place}"
        step = self.committed_step
        told = Stopped("failed", step, f"{reason}: {raised.message}", raised.traceback)
        self._serve_forced(told)

    def _close(self, watch: Watch) -> str:
        """End everything, whatever raises on the way; returns which lines were not written."""
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
        """On an object store, where a log is many objects."""
        if isinstance(self._run, DiskStorage):
            return None
        others = LineLog(self._run, METRICS), LineLog(self._run, SYSTEM)
        return Compactor(LineLog(self._run, JOURNAL), others, self._lease.look)

    def _open(self, opening: RunOpened) -> None:
        if self._is_heir() and self._before.stopped:
            self.outcome = self._before.stopped  # that controller died before it could tell
            return
        found = find_checkpoints(self._run)
        newest = LineLog(self._run, METRICS).last_rows(1)
        generations = [row["generation"] for row in newest if is_step_line(row)]
        for complaint in found.complaints:
            self._journal.write({"time": self._clock.now(), "warning": complaint, "format": FORMAT})
        self.post(
            dataclasses.replace(
                opening,
                incarnation=self._lease.epoch,
                saved=found.whole,
                newest_generation=max([found.newest_generation, *generations]),
            )
        )
        # What the publisher answers is of this session, so its answer must not come before it.
        self._publisher.order(DropCheckpoints(found.unfinished))

    def _is_heir(self) -> bool:
        """Whether it was the same actor that wrote the journal's last lines."""
        return self._lease.since <= self._core.state.incarnation

    def _goes_on(self, survivors: Survivors) -> bool:
        """Whether what lives is what the journal tells of: an object store's may lack the last
        second, and with it a generation."""
        if not self._is_heir() or self._before.stopped:
            return False
        generations: list[int] = []

        def ask() -> None:
            generations.append(survivors.newest_generation())

        if not self._start_guard.attempt("survivors", ask):
            return True  # the run ends for that, and what lives is to be saved
        return generations[0] <= self._core.state.generation

    def _go_on(self, survivors: Survivors, watch: Watch) -> None:
        """Take over what lives, and have done what may not have been done."""
        state, again = self._core.state, self._before.again()
        attempt = self._start_guard.attempt
        self.post(ControllerRestarted(self._lease.epoch, self._before.now))
        for worker in sorted(state.warm):
            seat = state.worker_records[worker]
            watch.note(WorkerReady(worker, seat.node, seat.pid))
        attempt("survivors", partial(survivors.attach, state))
        for command in again:
            attempt(type(command).__name__, partial(self._carry_out, command))

    def _lacking_lines(self) -> list[dict[str, Any]]:
        """Whoever wrote last may have died between an event's line and those that follow it."""
        untold, now = self._before.untold(), self._before.now
        lines = [command_line(now, command, self._core.state) for command in untold]
        if any(isinstance(command, Resume) for command in untold):
            lines.append(self._writer.full_state(now, self._core.state))
        return lines

    def _complete_metrics(self) -> None:
        """They may be behind the journal, or ahead of it."""
        rows = newest_rows(LineLog(self._run, METRICS), self._before)
        there = {(row["generation"], row["step"]) for row in rows}
        lacking = self._before.records
        while lacking:  # each once, also if one raises and this is tried again
            record = lacking[0].record
            if (record.generation, record.step) not in there:
                self._metrics.write(dataclasses.asdict(record))
            lacking.popleft()
        known = self._core.state.committed_step
        generation = self._core.state.generation
        self._ahead = {key for key in there if key[0] <= generation and key[1] > known}

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
        """One event: decide, make the decision durable, carry it out. What raises on the way is
        tried again, and after the third time given up: then the run ends, saved."""
        self._now, event = self._clock.now(), self._clock.on_this_clock(event)
        guarded, place = self._guarded, type(event).__name__
        self._note_storage(event)
        self._write_lines(place, self._writer.before(event, self._core.state, self._num_waiting()))
        commands = guarded.step(self._now, event)
        if commands is None:
            self.post(Woke())  # what else there is to be done is done without it
            return
        self._write_event(place, event, commands)
        for command in commands:
            is_done = guarded.attempt(type(command).__name__, partial(self._carry_out, command))
            if isinstance(command, Stopped) and not is_done:
                self.outcome = command
            for listener in tuple(self._listeners):
                listener.put(command)
        guarded.note_success(place)
        self._write_due(self._now)

    def _write_event(self, place: str, event: Event, commands: list[Command]) -> None:
        """The lines of an event and its commands, durable if there are any commands."""
        now, state, lines = self._now, self._core.state, deque[dict[str, Any]]()

        def compose() -> None:
            lines.extend(self._writer.after(now, event, commands, state, self._num_waiting()))

        write_all = partial(self._write_all, lines)
        actions: list[Callable[[], None]] = [self._lease.check, compose, write_all]
        if any(not isinstance(command, SILENT) for command in commands):
            actions.append(self._journal.make_durable)
        self._guarded.write(place, lambda: actions, self._write_state)

    def _write_due(self, now: float) -> None:
        """Write what has been held back for long enough."""
        if self.outcome is None:
            lines = self._writer.due(now, self._core.state, self._num_waiting())
            if lines:
                self._metrics.make_durable()  # a full state stands for steps in the metrics
            self._write_lines("journal", lines)

    def _write_lines(self, place: str, lines: list[dict[str, Any]]) -> None:
        if lines:
            write_all = partial(self._write_all, deque(lines))
            actions: list[Callable[[], None]] = [self._lease.check, write_all]
            self._guarded.write(place, lambda: actions, self._write_state)

    def _write_all(self, lines: deque[dict[str, Any]]) -> None:
        """Each once, also if one raises and this is tried again."""
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
        """The core has not come to its end in time."""
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

    def _carry_out(self, command: Command) -> None:
        match command:
            case PublishCheckpoint() | DropCheckpoints() | SetAside():
                self._publisher.order(command)
            case RecordStep():
                self._record(command.record)
            case Stopped():
                self.outcome = command
            case Resharded() | RolledBack() | Warned() | Waited() | LayoutAnswered():
                pass  # telling it was all there was to do
            case Replaced() | NodeQuarantined() | NodeReleased():
                pass  # likewise
            case _:
                if isinstance(command, Resume):
                    self._watch.note_members(command.workers)
                pass_on(self._fleet, command)

    def _record(self, record: StepRecord) -> None:
        """A step's line, and what was to be told once it has committed."""
        key = (record.generation, record.step)
        if key in self._ahead:
            self._ahead.discard(key)
        else:
            self._metrics.write(dataclasses.asdict(record))
        for entry in [entry for entry in self._due if entry[0] <= record.step]:
            self._due.remove(entry)
            self.post(entry[1])
