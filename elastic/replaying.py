"""A journal replayed: the core that it leaves, and the commands that may not have been obeyed."""

from __future__ import annotations

from collections import deque
from typing import Any

from elastic.commands import (
    AskKeepers,
    Command,
    DropCheckpoints,
    ForgetSnapshots,
    Form,
    Order,
    Protect,
    RecordStep,
    SetAside,
    Stopped,
    StopWorker,
)
from elastic.core import Core
from elastic.events import Event, RunOpened
from elastic.state import CoreState
from elastic.wire import replayed

NUM_KEPT_RECORDS = 4096


class Replay:
    """Takes a journal's lines (invariant 10). Begins at each full state anew; `now` is the time of
    the last line, and never goes back."""

    def __init__(self) -> None:
        self.core = Core()
        self.now = 0.0
        self.records: deque[RecordStep] = deque(maxlen=NUM_KEPT_RECORDS)
        """Of the newest steps: their lines may be lacking."""
        self.stopped: Stopped | None = None
        """How this session of the run has ended, if it has."""
        self._of_event: list[Command] = []
        self._num_told = 0
        self._since_form: list[Command] = []
        self._of_session: list[StopWorker | DropCheckpoints | SetAside] = []

    def take(self, line: dict[str, Any]) -> None:
        """Raises `UnreadableJournal` for a line of another format."""
        told = replayed(line)
        self.now = max(self.now, line["time"])
        if isinstance(told, CoreState):
            self.core = Core(told)
        elif told is not None:
            self._note(told, self.core.step(self.now, told))
        elif "command" in line:
            self._num_told += 1

    def untold(self) -> list[Command]:
        """The commands of the last event whose lines are lacking."""
        told: list[Command] = [c for c in self._of_event if not isinstance(c, RecordStep)]
        return told[self._num_told :]

    def again(self) -> list[Command]:
        """What shall be done once more, in order; whoever has done it already takes no notice.

        What is to be started is not among it: the core's state says what should be there.
        """
        seats = self.core.state.seats
        again: list[Command] = [
            c for c in self._of_session if not isinstance(c, StopWorker) or c.worker in seats
        ]
        newest = [c for c in self._since_form if isinstance(c, Protect)][-1:]
        return again + [c for c in self._since_form if not isinstance(c, Protect)] + newest

    def _note(self, event: Event, commands: list[Command]) -> None:
        self._of_event, self._num_told = commands, 0
        if isinstance(event, RunOpened):
            self._since_form, self._of_session, self.stopped = [], [], None
        if any(isinstance(command, Form) for command in commands):
            self._since_form = []
        for command in commands:
            match command:
                case RecordStep():
                    self.records.append(command)
                case StopWorker() | DropCheckpoints() | SetAside():
                    self._of_session.append(command)
                case Stopped():
                    self.stopped = command
                case _ if isinstance(command, Order | AskKeepers | ForgetSnapshots):
                    self._since_form.append(command)
