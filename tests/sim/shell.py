"""A simulated controller's shell: one inbox, the real core, a journal, the commands sent out."""

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

    def record(self, told: RecordStep) -> None:
        """One line of metrics, unless a controller that died has written it already."""
        key = (told.record.generation, told.record.step)
        if key not in self._written:
            self._written[key] = told
            self.metrics.append(told)
        same = replace(told.record, time=0.0, step_s=0.0)  # each worker measures its own
        first = replace(self._written[key].record, time=0.0, step_s=0.0)
        # What no worker has any more may have been written before the controller died.
        assert first == same or told.record.missing, "invariant 8: two reports of a step differ"

    def write(self, line: dict[str, Any]) -> None:
        if self.journal is not None:
            self.journal.append(json.dumps(line, allow_nan=False))


@dataclass
class Death:
    """How far a controller comes with the next event before it dies: so many journal lines, then so
    many commands."""

    num_lines: int
    num_commands: int
    then: Callable[[], None]


class SimShell:
    """Serves one event after the other, as `actors/controller/shell.py` does."""

    def __init__(
        self,
        timeline: Timeline,
        core: Core,
        records: Records,
        carry_out: Callable[[Command], None],
        check: Callable[[float, Event, list[Command], Core], None],
        before: Replay | None = None,
    ) -> None:
        """`before` is what the journal leaves behind, if there is one."""
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
        """Its process is gone: nothing is served any more."""
        self._closed = True

    def die_at_next_event(self, death: Death) -> None:
        """Its process will be gone in the midst of what it does then."""
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
        """Ask the timeline for the core's next deadline; an older alarm then does nothing."""
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
    """A journal replayed whole, from memory."""
    replay = Replay()
    for text in lines:
        replay.take(json.loads(text))
    return replay


def replay_newest(lines: list[str]) -> Replay:
    """From the newest full state on: as `actors/controller/journal.py` has it."""
    begins = [index for index, text in enumerate(lines) if '"CoreState"' in text]
    return replay(lines[begins[-1] if begins else 0 :])


def replay_whole(records: Records) -> Replay:
    """The journal replayed, and the lines added that a controller was about to write."""
    before = replay_newest(records.journal or [])
    untold = before.untold()
    for command in untold:
        records.write(command_line(before.now, command, before.core.state))
    if any(isinstance(command, Resume) for command in untold):
        records.write(state_line(before.now, before.core.state, before.unfinished))
    for told in before.records:
        records.record(told)
    return before
