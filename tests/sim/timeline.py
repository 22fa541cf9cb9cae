"""Threads that run in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from actors.simulation.timeline import Timeline


class Block(NamedTuple):
    """A thread waits for others, and raises `GroupBroken` after `timeout_s`."""

    on: str
    timeout_s: float | None = None


class GroupBroken(Exception):
    """A collective will never complete: a peer is gone, or it timed out."""


Body = Generator[float | Block, Any, None]
"""A thread's code; it yields the seconds that it is busy, or what it waits for."""


class Thread:
    """Runs a body; each wait is numbered, so that a wake-up for an older wait does nothing."""

    def __init__(self, timeline: Timeline, body: Body) -> None:
        self._timeline = timeline
        self._body = body
        self._wait = 0
        self._held_up: list[Callable[[], None]] | None = None
        self.ended = False
        self.waiting_on = ""
        self.wake(None, 0.0)

    def wake(self, value: Any, delay_s: float) -> None:
        """End the current wait with a value."""
        self._resume_after(delay_s, lambda: self._body.send(value))

    def interrupt(self, error: Exception, delay_s: float) -> None:
        """End the current wait with an exception."""
        self._resume_after(delay_s, lambda: self._body.throw(error))

    def stop(self) -> None:
        """Never run again."""
        self.ended = True

    def hold(self) -> None:
        """Like SIGSTOP: everything waits for `release`."""
        self._held_up = self._held_up or []

    def release(self) -> None:
        held_up, self._held_up = self._held_up or [], None
        for resume in held_up:
            self._timeline.after(0.0, resume)

    def _resume_after(self, delay_s: float, resume: Callable[[], float | Block]) -> None:
        wait = self._wait
        self._timeline.after(delay_s, lambda: self._resume(wait, resume))

    def _resume(self, wait: int, resume: Callable[[], float | Block]) -> None:
        if self.ended or wait != self._wait:
            return
        if self._held_up is not None:
            self._held_up.append(lambda: self._resume(wait, resume))
            return
        self._wait += 1
        self.waiting_on = ""
        try:
            busy = resume()
        except StopIteration:
            self.ended = True
            return
        if isinstance(busy, Block):
            self.waiting_on = busy.on
            if busy.timeout_s is not None:
                self.interrupt(GroupBroken("Timed out waiting"), busy.timeout_s)
        else:
            self.wake(None, busy)


class Channel:
    """Delivers in the order of sending."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._last_arrival = 0.0

    def send(self, delay_s: float, deliver: Callable[[], None]) -> None:
        self._last_arrival = max(self._last_arrival, self._timeline.now + delay_s)
        self._timeline.after(self._last_arrival - self._timeline.now, deliver)
