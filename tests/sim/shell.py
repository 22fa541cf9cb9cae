"""A simulated controller's shell: one inbox, the real core, a journal, the commands sent out."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sim.timeline import Timeline

from elastic.commands import Command, RecordStep, Resume, Stopped
from elastic.core import Core
from elastic.events import Event, Woke
from elastic.state import CoreState
from elastic.wire import command_line, event_line, replayed, state_line

MAX_WAKES_AT_ONCE = 3


@dataclass
class Records:
    """What outlives a controller: the journal, the metrics, and a trace for people."""

    journal: list[str] | None = None
    metrics: list[RecordStep] = field(default_factory=list)
    trace: list[tuple[float, Event, list[Command], str]] = field(default_factory=list)

    def write(self, line: dict[str, Any]) -> None:
        if self.journal is not None:
            self.journal.append(json.dumps(line, allow_nan=False))


class SimShell:
    """Serves one event after the other, as `actors/shell.py` does."""

    def __init__(
        self,
        timeline: Timeline,
        core: Core,
        records: Records,
        carry_out: Callable[[Command], None],
        check: Callable[[float, Event, list[Command], Core], None],
    ) -> None:
        self.core = core
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

    def close(self) -> None:
        """Its process is gone: nothing is served any more."""
        self._closed = True

    def _serve(self, event: Event) -> None:
        now, core, records = self._timeline.now, self.core, self._records
        commands = core.step(now, event)
        records.trace.append((now, event, commands, type(core.state.phase).__name__))
        records.write(event_line(now, event, core.state))
        for command in commands:
            if isinstance(command, RecordStep):
                records.metrics.append(command)
            else:
                records.write(command_line(now, command, core.state))
            if isinstance(command, Resume) and records.journal is not None:
                records.write(state_line(now, core.state))
        self._check(now, event, commands, core)
        for command in commands:
            if isinstance(command, Stopped):
                self.outcome = command
                self.close()
            self._carry_out(command)

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


def replay(lines: Iterable[str]) -> Core:
    """The core as a journal leaves it: as `actors/journal.py` has it, from memory."""
    core, now = Core(), 0.0
    for text in lines:
        line = json.loads(text)
        told = replayed(line)
        now = max(now, line["time"])
        if isinstance(told, CoreState):
            core = Core(told)
        elif told is not None:
            core.step(now, told)
    return core
