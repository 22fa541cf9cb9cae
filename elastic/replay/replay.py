"""Replay of a journal: the core's state, and the commands that may not have been carried out."""

from __future__ import annotations

from collections import deque
from typing import Any

from elastic.controller.core import Core
from elastic.protocol.commands import Command, RecordStep, Stopped
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Event
from elastic.protocol.pending_commands import PendingCommands
from elastic.protocol.wire import is_steps, lacking_of, replayed, steps_of, unfinished_of
from elastic.replay.journal_lines import NUM_KEPT_RECORDS, replay_cost


class Replay:
    """Takes a journal's lines (invariant 10) and restarts at each full state.

    `now` is the time of the last line, and never goes back.
    """

    def __init__(self) -> None:
        self.core = Core()
        self.now = 0.0
        self.records: deque[RecordStep] = deque(maxlen=NUM_KEPT_RECORDS)
        """Records of the newest steps: their lines of metrics may be missing."""
        self.unfinished = PendingCommands()
        self.num_events = 0
        """The cost since the newest full state, as `replay_cost` counts it."""
        self._last_commands: list[Command] = []
        self._num_command_lines = 0

    def take(self, line: dict[str, Any]) -> None:
        """Take one line. Raises `UnreadableJournal` for a line of another format."""
        if is_steps(line):
            for now, event in steps_of(line):
                self._step(now, event)
            return
        replayed_line = replayed(line)
        self.now = max(self.now, line["time"])
        if isinstance(replayed_line, ControllerState):
            self.core, self.unfinished = Core(replayed_line), unfinished_of(line)
            self.records.extend(map(RecordStep, lacking_of(line)))
            self._last_commands, self._num_command_lines, self.num_events = [], 0, 0
        elif replayed_line is not None:
            self._step(line["time"], replayed_line)
        elif "command" in line:
            self._num_command_lines += 1

    @property
    def stopped(self) -> Stopped | None:
        """How this session of the run has ended, if it has."""
        return self.unfinished.stopped

    def missing_commands(self) -> list[Command]:
        """The commands of the last event whose lines are missing in the journal."""
        with_lines: list[Command] = [
            c for c in self._last_commands if not isinstance(c, RecordStep)
        ]
        return with_lines[self._num_command_lines :]

    def commands_to_repeat(self) -> list[Command]:
        """The commands to repeat, in order; receivers that have carried them out ignore them."""
        return self.unfinished.commands_to_repeat(self.core.state.membership.records.keys())

    def _step(self, now: float, event: Event) -> None:
        self.now = max(self.now, now)
        commands = self.core.step(self.now, event)
        self.num_events += replay_cost(event, commands)
        self._last_commands, self._num_command_lines = commands, 0
        self.unfinished.note(event, commands)
        self.records.extend(c for c in commands if isinstance(c, RecordStep))
