"""A controller's session of a run: one event is decided, written, made durable, and executed.

A session has no thread, queue or clock of its own: its parts are given. `Shell` drives it.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from actors.controller.fleet import Fleet, dispatch
from actors.controller.guard import GuardedCore
from actors.controller.journal import replay_of
from actors.controller.shell_parts import Detector, JoinedInbox, RunClock, ShellParts, StorageOrders
from actors.storage.file_names import JOURNAL, METRICS
from actors.storage.lease import Lease
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import CLOSE_PATIENCE_S, Lines
from actors.storage.storage import Storage
from elastic.protocol.commands import (
    Command,
    DropCheckpoints,
    PublishCheckpoint,
    RecordStep,
    Resume,
    SetAside,
    Stopped,
)
from elastic.protocol.events import Checkpointed, Event, PartFailed, Woke
from elastic.protocol.notes import Note
from elastic.protocol.votes import StepRecord
from elastic.protocol.wire import command_line, metrics_row
from elastic.replay.journal_lines import SILENT, JournalWriter


class ControllerSession:
    """Processes events one after the other, on one thread; `post` may be called from any."""

    _fleet: Fleet
    _detector: Detector
    _publisher: StorageOrders

    def __init__(
        self,
        run: Storage,
        lease: Lease,
        due: tuple[tuple[int, Event], ...] = (),
        parts: ShellParts | None = None,
    ) -> None:
        """`due` are events to post once their step has committed."""
        self._parts = parts = parts or ShellParts()
        self._due = list(due)
        self._run = run
        self._lease = lease
        self._inbox = JoinedInbox(parts.make_inbox())
        self._journal = parts.open_journal(LineLog(run, JOURNAL), lease)
        opened = [self._journal]
        try:
            self._metrics = parts.open_metrics(LineLog(run, METRICS), lease)
            opened.append(self._metrics)
            self._before = replay_of(lease, LineLog(run, JOURNAL))
        except Exception:
            close_logs(opened, patience_s=0.0)
            raise
        self._core = parts.make_core(self._before.core.state)
        self._writer = JournalWriter(
            self._before.unfinished, self._before.records, self._before.num_events
        )
        self._now = self._before.now
        self._guarded = GuardedCore(self._core, self._serve, parts.sleep)
        self._clock = RunClock(self._before.now, parts.wall, parts.monotonic)
        self._ahead: set[tuple[int, int]] = set()
        """Generation and step of the metrics lines that the journal does not know of."""
        self._listeners: list[queue.Queue[Command]] = []
        self._unsaved: PartFailed | None = None
        """The newest checkpoint whose writing failed, until a later one succeeds."""
        self.has_trained = False
        """Whether a step has committed in this session."""
        self.outcome: Stopped | None = None

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    @property
    def trouble(self) -> str:
        """What currently waits for storage, and why; empty if nothing does."""
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

    def _take(self, event: Event) -> None:
        """Process an event from the inbox."""
        self._guarded.attempt("watch", partial(self._detector.note, event))
        self._serve(event)

    def _look_after(self) -> None:
        """Do what is due while no events arrive."""
        self._lease.check()
        self._journal.flush()
        self._metrics.flush()
        self._write_due(self._clock.now())

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
        succeeded: list[str] = []
        for command in commands:
            kind = type(command).__name__
            if guarded.attempt(kind, partial(self._execute, command)):
                succeeded.append(kind)
            elif isinstance(command, Stopped):
                self.outcome = command
            self._inform_listeners(command)
        for name in (*succeeded, place):
            guarded.note_success(name)
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
        self._inform_listeners(stopped)

    def _inform_listeners(self, command: Command) -> None:
        for listener in tuple(self._listeners):
            listener.put(command)

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
                self.has_trained = True
            case Stopped():
                self.outcome = command
            case _ if isinstance(command, Note):
                pass  # the journal line is all that it needs
            case _:
                if isinstance(command, Resume):
                    self._detector.note_members(command.workers)
                dispatch(self._fleet, command)

    def _record(self, record: StepRecord) -> None:
        """Write a step's metrics line, and post the events that were due at it."""
        key = (record.generation, record.step)
        if key in self._ahead:
            self._ahead.discard(key)
        else:
            self._metrics.write(metrics_row(record))
        for entry in [entry for entry in self._due if entry[0] <= record.step]:
            self._due.remove(entry)
            self.post(entry[1])


def waiting_for_storage(unsaved: PartFailed | None, logs: Mapping[str, Lines]) -> str:
    """What waits for storage, and why; empty if nothing does. `unsaved` is a failed checkpoint."""
    waiting = [f"the checkpoint of step {unsaved.step}"] if unsaved else []
    causes = [unsaved.cause] if unsaved else []
    for name, lines in logs.items():
        if lines.trouble:
            waiting += [counted_lines(lines.num_waiting, name)] if lines.num_waiting else [name]
            causes.append(lines.trouble)
    return f"{', '.join(waiting)} ({causes[-1]})" if waiting else ""


def counted_lines(num_lines: int, name: str) -> str:
    return f"{num_lines:,} {'line' if num_lines == 1 else 'lines'} of {name}"


def close_logs(logs: Iterable[Lines], patience_s: float = CLOSE_PATIENCE_S) -> str:
    """Close all logs within `patience_s`; return which lines were not written, or ""."""
    deadline = time.monotonic() + patience_s
    unwritten = [lines.close(max(0.0, deadline - time.monotonic())) for lines in logs]
    return "; ".join(part for part in unwritten if part)


def with_shortfall(outcome: Stopped, unwritten: str) -> Stopped:
    """The outcome with the lost lines; a run that loses its last lines is not complete."""
    if not unwritten:
        return outcome
    kind = "failed" if outcome.outcome == "completed" else outcome.outcome
    reason = "; ".join(part for part in (outcome.reason, unwritten) if part)
    return dataclasses.replace(outcome, outcome=kind, reason=reason)
