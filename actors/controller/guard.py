"""Unexpected exceptions in the controller: what raised is tried again, twice, and then given up.

Each is reported by `ControllerRaised`, so that it is in the journal; the core has the run saved,
and after the third in a row ended. See `elastic.controller.controller_errors`.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

from actors.storage.errors import LeaseLost
from elastic.controller.controller_errors import MAX_IN_A_ROW, count_error, is_failing, is_given_up
from elastic.controller.core import Core
from elastic.protocol.commands import Command, Stopped
from elastic.protocol.controller_events import ControllerRaised, ControllerRecovered
from elastic.protocol.events import Event, Woke
from elastic.protocol.phases import Ended as StoppedPhase
from elastic.replay.undo import UndoableCore

PAUSE_S = 0.1
"""Before another try; twice as long before the next."""
NEXT_EVENT = "next event"
OWN_PLACES = (NEXT_EVENT, Woke.__name__)
"""What the shell comes to by itself, again at once if it fails."""
GIVEN_UP_PAUSE_S = 1.0
"""After a failure there once nothing is tried again."""


def describe(place: str, error: Exception) -> ControllerRaised:
    """The event of an exception."""
    text = "".join(traceback.format_exception(error))
    first_line = (str(error).splitlines() or [""])[0]
    return ControllerRaised(place, f"{type(error).__name__}: {first_line}", text)


class GuardedCore:
    """The core as the shell drives it; every action of the shell that may raise passes here.

    `LeaseLost` is no such exception: another controller has the run.
    """

    def __init__(self, core: Core, serve: Callable[[Event], None]) -> None:
        """`serve` takes an event as any other, in the shell's thread."""
        self._core = core
        self._undoable = UndoableCore(core)
        self._serve = serve
        self._is_reporting = False
        self._postponed: list[ControllerRaised] | None = None
        """While lines are written: what raised meanwhile."""
        self._lacks_lines = False
        """Whether the journal lacks lines that have been given up."""
        self._force_at: float | None = None
        self._has_begun = False
        """Whether an event of this session of the run has been taken, or given up."""

    @property
    def is_failing(self) -> bool:
        """Whether the controller's exceptions end the run."""
        return is_failing(self._core.state)

    def step(self, now: float, event: Event) -> list[Command] | None:
        """As `Core.step`; None if the event was given up, which has then changed nothing."""
        taken: list[list[Command]] = []
        place = type(event).__name__
        is_taken = self.attempt(place, lambda: taken.append(self._undoable.step(now, event)))
        self._has_begun = True
        return taken[0] if is_taken else None

    def next(self, wait: Callable[[], Event]) -> Event:
        """The next event; if it cannot be waited for, the time has come to look around."""
        events: list[Event] = []
        is_there = self.attempt(NEXT_EVENT, lambda: events.append(wait()))
        return events[0] if is_there else Woke()

    def write(
        self,
        place: str,
        find_actions: Callable[[], Sequence[Callable[[], None]]],
        write_state: Callable[[], None],
    ) -> None:
        """Do these actions in turn, each once. Exceptions are reported after them, since the lines
        of one event belong together; after lines that were given up, the whole state is written."""
        found: list[deque[Callable[[], None]]] = []

        def go_on() -> None:
            if not found:
                found.append(deque(find_actions()))
            [left] = found
            while left:
                left[0]()
                left.popleft()
            if self._lacks_lines:
                write_state()
                self._lacks_lines = False

        self._postponed = []
        try:
            self._lacks_lines |= not self.attempt(place, go_on)
        finally:
            postponed, self._postponed = self._postponed, None
        for error in postponed:
            self._report(error)

    def attempt(self, place: str, action: Callable[[], object]) -> bool:
        """Do it; False if it was given up."""
        for number in range(1, MAX_IN_A_ROW + 1):
            was_given_up = is_given_up(self._core.state, place) and self.is_failing
            try:
                action()
            except LeaseLost:
                raise
            except Exception as error:
                if was_given_up:
                    if place in OWN_PLACES:
                        time.sleep(GIVEN_UP_PAUSE_S)
                    return False
                self._report(describe(place, error))
                if is_given_up(self._core.state, place):
                    return False
                time.sleep(PAUSE_S * number)
            else:
                return True
        return False

    def note_success(self, place: str) -> None:
        if place in self._core.state.controller_errors and not self.is_failing:
            self._serve(ControllerRecovered(place))

    def forced_end(self, now: float) -> Stopped | None:
        """How a run ends that its controller's exceptions end, if the core does not get there: the
        last checkpoint has had its time, or the core has stopped before."""
        state = self._core.state
        if not (self.is_failing and self._has_begun):
            return None
        policy = state.policy
        if self._force_at is None:
            patience_s = policy.hang_timeout_s + policy.collective_timeout_s + policy.save_timeout_s
            self._force_at = now + patience_s
        if now < self._force_at and not isinstance(state.phase, StoppedPhase):
            return None
        ending = state.ending
        assert ending is not None
        return Stopped("failed", state.committed_step, ending.reason, ending.traceback)

    def _report(self, error: ControllerRaised) -> None:
        """Never raises, whatever is broken: the count is kept at least in memory."""
        if self._postponed is not None:
            self._postponed.append(error)
            return
        state = self._core.state
        num_before = state.controller_errors.get(error.place, 0)
        if not self._is_reporting:
            self._is_reporting = True
            try:
                self._serve(error)
            finally:
                self._is_reporting = False
        state = self._core.state
        if state.controller_errors.get(error.place, 0) == num_before:
            count_error(state, error)
            self._undoable.replace_state(state)


class ThreadGuard:
    """Reports what raises in another of the controller's threads, which then goes on."""

    def __init__(self, place: str, post: Callable[[Event], None]) -> None:
        self._place = place
        self._post = post
        self._has_failed = False

    def note_error(self, error: Exception) -> None:
        self._has_failed = True
        self._post(describe(self._place, error))

    def note_success(self) -> None:
        """It has done its work once more."""
        if self._has_failed:
            self._has_failed = False
            self._post(ControllerRecovered(self._place))
