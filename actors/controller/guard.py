"""Guard against unexpected exceptions in the controller: retry an action twice, then give it up.

`ControllerRaised` reports each exception, so that it is in the journal. The core saves the run, and
ends it after the third exception in a row. See `elastic.controller.controller_errors`.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

from actors.storage.errors import LeaseLost
from elastic.controller.controller_errors import MAX_IN_A_ROW, count_error, is_failing, is_given_up
from elastic.controller.core import Core
from elastic.duties.uploads import write_patience_s
from elastic.protocol.commands import Command, Stopped
from elastic.protocol.controller_events import ControllerRaised, ControllerRecovered
from elastic.protocol.events import Event, Woke
from elastic.protocol.phases import Ended as StoppedPhase
from elastic.replay.undo import UndoableCore

PAUSE_S = 0.1
"""The pause before the first retry; before the second it is twice as long."""
NEXT_EVENT = "next event"
OWN_PLACES = (NEXT_EVENT, Woke.__name__)
"""The places that the shell reaches without an event; it would repeat a failure there at once."""
GIVEN_UP_PAUSE_S = 1.0
"""The pause after a failure at such a place that is not retried any more."""


def describe(place: str, error: Exception) -> ControllerRaised:
    """The event that reports an exception."""
    text = "".join(traceback.format_exception(error))
    first_line = (str(error).splitlines() or [""])[0]
    return ControllerRaised(place, f"{type(error).__name__}: {first_line}", text)


class GuardedCore:
    """The core as the shell drives it; it guards every action of the shell that may raise.

    It does not guard against `LeaseLost`: then another controller drives the run.
    """

    def __init__(
        self,
        core: Core,
        serve: Callable[[Event], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`serve` processes an event on the shell's thread."""
        self._core = core
        self._sleep = sleep
        self._undoable = UndoableCore(core)
        self._serve = serve
        self._is_reporting = False
        self._postponed: list[ControllerRaised] | None = None
        """The exceptions so far while lines are being written, else None."""
        self._lacks_lines = False
        """Whether the journal lacks lines whose writing was given up."""
        self._force_at: float | None = None
        self._has_begun = False
        """Whether this session of the run has processed, or given up, an event."""

    @property
    def is_failing(self) -> bool:
        """Whether the controller's exceptions end the run."""
        return is_failing(self._core.state)

    def step(self, now: float, event: Event) -> list[Command] | None:
        """As `Core.step`; None if the event was given up, in which case it changed nothing."""
        results: list[list[Command]] = []
        place = type(event).__name__
        is_done = self.attempt(place, lambda: results.append(self._undoable.step(now, event)))
        self._has_begun = True
        return results[0] if is_done else None

    def next(self, wait: Callable[[], Event]) -> Event:
        """The next event; `Woke` if waiting for it was given up."""
        events: list[Event] = []
        is_there = self.attempt(NEXT_EVENT, lambda: events.append(wait()))
        return events[0] if is_there else Woke()

    def write(
        self,
        place: str,
        find_actions: Callable[[], Sequence[Callable[[], None]]],
        write_state: Callable[[], None],
    ) -> None:
        """Run these actions in turn, each once. Exceptions are reported afterwards, since the lines
        of one event belong together. If lines were given up before, the full state is written."""
        queues: list[deque[Callable[[], None]]] = []

        def run_remaining() -> None:
            if not queues:
                queues.append(deque(find_actions()))
            [remaining] = queues
            while remaining:
                remaining[0]()
                remaining.popleft()
            if self._lacks_lines:
                write_state()
                self._lacks_lines = False

        self._postponed = []
        try:
            self._lacks_lines |= not self.attempt(place, run_remaining)
        finally:
            postponed, self._postponed = self._postponed, None
        for error in postponed:
            self._report(error)

    def attempt(self, place: str, action: Callable[[], object]) -> bool:
        """Run the action, with retries; return False if it was given up."""
        for number in range(1, MAX_IN_A_ROW + 1):
            was_given_up = is_given_up(self._core.state, place) and self.is_failing
            try:
                action()
            except LeaseLost:
                raise
            except Exception as error:
                if was_given_up:
                    if place in OWN_PLACES:
                        self._sleep(GIVEN_UP_PAUSE_S)
                    return False
                self._report(describe(place, error))
                if is_given_up(self._core.state, place):
                    return False
                self._sleep(PAUSE_S * number)
            else:
                return True
        return False

    def note_success(self, place: str) -> None:
        if place in self._core.state.errors.counts and not self.is_failing:
            self._serve(ControllerRecovered(place))

    def forced_end(self, now: float) -> Stopped | None:
        """The end of a run that the controller's exceptions end, if the core does not end it: the
        time for the last checkpoint has passed, or the core had stopped before."""
        state = self._core.state
        if not (self.is_failing and self._has_begun):
            return None
        policy = state.policy
        if self._force_at is None:
            patience_s = policy.hang_timeout_s + policy.collective_timeout_s
            self._force_at = now + patience_s + write_patience_s(state)
        if now < self._force_at and not isinstance(state.phase, StoppedPhase):
            return None
        ending = state.ending
        assert ending is not None
        return Stopped("failed", state.committed_step, ending.reason, ending.traceback)

    def _report(self, error: ControllerRaised) -> None:
        """Report an exception. This never raises; at the least it counts the error in memory."""
        if self._postponed is not None:
            self._postponed.append(error)
            return
        state = self._core.state
        num_before = state.errors.counts.get(error.place, 0)
        if not self._is_reporting:
            self._is_reporting = True
            try:
                self._serve(error)
            finally:
                self._is_reporting = False
        state = self._core.state
        if state.errors.counts.get(error.place, 0) == num_before:
            count_error(state, error)
            self._undoable.replace_state(state)


class ThreadGuard:
    """Reports exceptions of the controller's other threads, which then go on."""

    def __init__(self, place: str, post: Callable[[Event], None]) -> None:
        self._place = place
        self._post = post
        self._has_failed = False

    def note_error(self, error: Exception) -> None:
        self._has_failed = True
        self._post(describe(self._place, error))

    def note_success(self) -> None:
        """Report the recovery if the thread had failed before."""
        if self._has_failed:
            self._has_failed = False
            self._post(ControllerRecovered(self._place))
