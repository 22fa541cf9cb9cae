"""A core that can undo an event whose handling raised."""

from __future__ import annotations

from elastic.controller.core import Core
from elastic.protocol.commands import Command
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Event
from elastic.replay.state_copy import copy_state

NUM_KEPT_EVENTS = 256
EVENTS_PER_WORKER = 4
"""A recovery has about three events for each worker. A copy every 256 events would delay that of
many workers."""


class UndoableCore:
    """Drives a core, and undoes changes that an exception left incomplete.

    It keeps a copy of the state and the events since, at most `NUM_KEPT_EVENTS` or
    `EVENTS_PER_WORKER` for each worker, if that is more. The state before an event follows from
    them, as from a journal (invariant 10), regardless of what storage has.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._copy_state()

    def step(self, now: float, event: Event) -> list[Command]:
        """Like `Core.step`; if that raises, the core's state is as before."""
        try:
            commands = self._core.step(now, event)
        except Exception:
            self._core.state = self._state_before()
            raise
        self._events.append((now, event))
        if len(self._events) >= self._num_kept:
            self._copy_state()
        return commands

    def replace_state(self, state: ControllerState) -> None:
        """Continue from a state that did not result from events."""
        self._core.state = state
        self._copy_state()

    def _copy_state(self) -> None:
        self._base = copy_state(self._core.state)
        num_workers = len(self._base.membership.records)
        self._num_kept = max(NUM_KEPT_EVENTS, EVENTS_PER_WORKER * num_workers)
        self._events: list[tuple[float, Event]] = []

    def _state_before(self) -> ControllerState:
        core = Core(copy_state(self._base))
        for now, event in self._events:
            core.step(now, event)
        return core.state
