"""The inbox of a shell in simulated time: while the shell waits, the rest of the world goes on."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol

from elastic.protocol.events import Event, Woke


class ShellClock(Protocol):
    """What an inbox needs of the process that runs the shell."""

    @property
    def now(self) -> float:
        """The simulated time."""

    @property
    def newest_deadline(self) -> float | None:
        """The last answer of the core's `next_deadline`."""

    def end_event(self) -> None:
        """The shell has handled an event to its end."""

    def wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Let time pass for the rest of the world."""


class SimulatedInbox:
    """Time passes while the shell waits for an event.

    A timer wakes the core at times without need: a moment before a deadline, or at one that does
    not count any more. The core must bear that, and the order of random draws depends on it.
    """

    def __init__(self, process: ShellClock) -> None:
        self._process = process
        self._events: deque[Event] = deque()
        self._deadline: float | None = None
        """The newest deadline of the core for which the timer has not gone off."""
        self._timer_at = inf

    def put(self, event: Event) -> None:
        self._events.append(event)

    def empty(self) -> bool:
        return not self._events

    def get(self, *, timeout: float) -> Event:
        process, events = self._process, self._events
        process.end_event()
        if events:
            return events.popleft()
        deadline, now = process.newest_deadline, process.now
        if deadline is not None and deadline != self._deadline:
            self._deadline, self._timer_at = deadline, now + max(0.0, deadline - now)
        process.wait(min(timeout, self._timer_at - now), lambda: bool(events))
        if events:
            return events.popleft()
        if process.now >= self._timer_at:
            self._deadline, self._timer_at = None, inf
            if deadline is None or deadline > process.now:
                return Woke()
        raise queue.Empty


class NoDetector:
    """No failure detector: the simulated world reports what a detector would."""

    def note(self, event: Event) -> None:
        """Nothing."""

    def note_members(self, workers: Iterable[str]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
