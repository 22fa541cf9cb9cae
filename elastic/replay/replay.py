"""A journal replayed: the core that it leaves, and the commands that may not have been obeyed."""

from __future__ import annotations

from collections import deque
from typing import Any

from elastic.controller.core import Core
from elastic.protocol.commands import Command, RecordStep, Stopped
from elastic.protocol.controller_state import CoreState
from elastic.protocol.events import Event
from elastic.protocol.pending_commands import Unfinished
from elastic.protocol.wire import is_steps, lacking_of, replayed, steps_of, unfinished_of
from elastic.replay.journal_lines import NUM_KEPT_RECORDS, replay_cost


class Replay:
    """Takes a journal's lines (invariant 10). Begins at each full state anew; `now` is the time of
    the last line, and never goes back."""

    def __init__(self) -> None:
        self.core = Core()
        self.now = 0.0
        self.records: deque[RecordStep] = deque(maxlen=NUM_KEPT_RECORDS)
        """Of the newest steps: their lines may be lacking."""
        self.unfinished = Unfinished()
        self.num_events = 0
        """Since the newest full state, as `replay_cost` counts them."""
        self._of_event: list[Command] = []
        self._num_told = 0

    def take(self, line: dict[str, Any]) -> None:
        """Raises `UnreadableJournal` for a line of another format."""
        if is_steps(line):
            for now, event in steps_of(line):
                self._step(now, event)
            return
        told = replayed(line)
        self.now = max(self.now, line["time"])
        if isinstance(told, CoreState):
            self.core, self.unfinished = Core(told), unfinished_of(line)
            self.records.extend(map(RecordStep, lacking_of(line)))
            self._of_event, self._num_told, self.num_events = [], 0, 0
        elif told is not None:
            self._step(line["time"], told)
        elif "command" in line:
            self._num_told += 1

    @property
    def stopped(self) -> Stopped | None:
        """How this session of the run has ended, if it has."""
        return self.unfinished.stopped

    def untold(self) -> list[Command]:
        """The commands of the last event whose lines are lacking."""
        told: list[Command] = [c for c in self._of_event if not isinstance(c, RecordStep)]
        return told[self._num_told :]

    def again(self) -> list[Command]:
        """What shall be done once more, in order; whoever has done it already takes no notice."""
        return self.unfinished.again(self.core.state.worker_records.keys())

    def _step(self, now: float, event: Event) -> None:
        self.now = max(self.now, now)
        commands = self.core.step(self.now, event)
        self.num_events += replay_cost(event, commands)
        self._of_event, self._num_told = commands, 0
        self.unfinished.note(event, commands)
        self.records.extend(c for c in commands if isinstance(c, RecordStep))
