"""A simulated controller's shell: one inbox, the real core, a journal, and commands sent out."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from sim.timeline import Timeline

from elastic.controller.core import Core
from elastic.protocol.commands import Command, RecordStep, Resume, Stopped
from elastic.protocol.events import Event, Woke
from elastic.protocol.wire import command_line, state_line
from elastic.replay.journal_lines import JournalWriter
from elastic.replay.replay import Replay

MAX_WAKES_AT_ONCE = 3


@dataclass
class Records:
    """What outlives a controller: the journal, the metrics, and a trace for people."""

    journal: list[str] | None = None
    metrics: list[RecordStep] = field(default_factory=list)
    trace: list[tuple[float, Event, list[Command], str]] = field(default_factory=list)
    _written: dict[tuple[int, int], RecordStep] = field(default_factory=dict)
    """The metrics by generation and step."""

    def record(self, command: RecordStep) -> None:
        """Write one line of metrics, unless a controller that died has written it already."""
        key = (command.record.generation, command.record.step)
        if key not in self._written:
            self._written[key] = command
            self.metrics.append(command)
        same = replace(command.record, time=0.0, step_s=0.0)  # each worker measures its own times
        first = replace(self._written[key].record, time=0.0, step_s=0.0)
        # A record that no worker has any more may have been written before the controller died.
        assert first == same or command.record.missing, "invariant 8: two reports of a step differ"

    def write(self, line: dict[str, Any]) -> None:
        if self.journal is not None:
            self.journal.append(json.dumps(line, allow_nan=False))


@dataclass
class Death:
    """How far a controller gets with the next event before it dies: this many journal lines, then
    this many commands."""

    num_lines: int
    num_commands: int
    then: Callable[[], None]


class SimShell:
    """Handles one event after the other, as `actors/controller/shell.py` does."""

    def __init__(
        self,
        timeline: Timeline,
        core: Core,
        records: Records,
        carry_out: Callable[[Command], None],
        check: Callable[[float, Event, list[Command], Core], None],
        before: Replay | None = None,
    ) -> None:
        """`before` is the replay of an earlier controller's journal, if there is one."""
        self.core = core
        self._writer = (
            JournalWriter(before.unfinished, before.records, before.num_events)
            if before
            else JournalWriter()
        )
        self.outcome: Stopped | None = None
        self._timeline = timeline
        self._records = records
        self._carry_out = carry_out
        self._check = check
        self._inbox: deque[Event] = deque()
        self._serving = False
        self._closed = False
        self._wake_at: float | None = None
        self._wakes: deque[float] = deque(maxlen=MAX_WAKES_AT_ONCE)
        self._death: Death | None = None

    def post(self, event: Event) -> None:
        """An event arrives."""
        if self._closed:
            return
        self._inbox.append(event)
        if self._serving:
            return
        self._serving = True
        while self._inbox and not self._closed:
            self._serve(self._inbox.popleft())
        self._serving = False
        self._set_alarm()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """The process is gone: no event is handled any more."""
        self._closed = True

    def die_at_next_event(self, death: Death) -> None:
        """The process dies while it handles the next event."""
        self._death = death

    def _serve(self, event: Event) -> None:
        now, core, records, death = self._timeline.now, self.core, self._records, self._death
        if death and not death.num_lines:
            self._die(death)
            return
        lines = self._writer.before(event, core.state)
        commands = core.step(now, event)
        records.trace.append((now, event, commands, type(core.state.phase).__name__))
        self._check(now, event, commands, core)
        lines += self._writer.after(now, event, commands, core.state)
        for line in lines[: death.num_lines if death else None]:
            records.write(line)
        if death and death.num_lines < len(lines):
            self._die(death)
            return
        for command in commands[: death.num_commands if death else None]:
            self._obey(command)
        if death:
            self._die(death)
            return
        for line in self._writer.due(now, core.state) if self.outcome is None else ():
            records.write(line)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Stopped):
            self.outcome = command
            self.close()
        elif isinstance(command, RecordStep):
            self._records.record(command)
        self._carry_out(command)

    def _die(self, death: Death) -> None:
        if self.outcome is None:
            self.close()
            death.then()

    def _set_alarm(self) -> None:
        """Schedule the core's next deadline; an older alarm then does nothing."""
        deadline = self.core.next_deadline()
        if self._closed or deadline is None or deadline == self._wake_at:
            return
        self._wake_at = deadline
        self._timeline.after(max(0.0, deadline - self._timeline.now), lambda: self._wake(deadline))

    def _wake(self, deadline: float) -> None:
        if self._closed or deadline != self._wake_at:
            return
        now = self._timeline.now
        assert list(self._wakes) != [now] * MAX_WAKES_AT_ONCE, "invariant 9: the core spins"
        self._wakes.append(now)
        self._wake_at = None
        self.post(Woke())


def replay(lines: Iterable[str]) -> Replay:
    """Replay a journal in memory, all of it."""
    replay = Replay()
    for text in lines:
        replay.take(json.loads(text))
    return replay


def replay_newest(lines: list[str]) -> Replay:
    """Replay from the newest full state on, as `actors/controller/journal.py` does."""
    begins = [index for index, text in enumerate(lines) if '"ControllerState"' in text]
    return replay(lines[begins[-1] if begins else 0 :])


def replay_whole(records: Records) -> Replay:
    """Replay the journal, and add the lines that a controller was about to write."""
    before = replay_newest(records.journal or [])
    missing = before.untold()
    for command in missing:
        records.write(command_line(before.now, command, before.core.state))
    if any(isinstance(command, Resume) for command in missing):
        records.write(state_line(before.now, before.core.state, before.unfinished))
    for command in before.records:
        records.record(command)
    return before
