"""A core that stands as before an event whose handling raised."""

from __future__ import annotations

from copy import deepcopy

from elastic.controller.core import Core
from elastic.protocol.commands import Command
from elastic.protocol.controller_state import CoreState
from elastic.protocol.events import Event

NUM_KEPT_EVENTS = 256


class UndoableCore:
    """Drives a core, and takes back what an exception left half done.

    It keeps a copy of the state and the events since, at most `NUM_KEPT_EVENTS`: the state before
    an event follows from them, as from a journal (invariant 10), whatever storage has of it.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._keep()

    def step(self, now: float, event: Event) -> list[Command]:
        """As `Core.step`; if that raises, the core's state is as before."""
        try:
            commands = self._core.step(now, event)
        except Exception:
            self._core.state = self._state_before()
            raise
        self._events.append((now, event))
        if len(self._events) >= NUM_KEPT_EVENTS:
            self._keep()
        return commands

    def replace_state(self, state: CoreState) -> None:
        """Go on from a state that no event has led to."""
        self._core.state = state
        self._keep()

    def _keep(self) -> None:
        self._base = deepcopy(self._core.state)
        self._events: list[tuple[float, Event]] = []

    def _state_before(self) -> CoreState:
        core = Core(deepcopy(self._base))
        for now, event in self._events:
            core.step(now, event)
        return core.state
