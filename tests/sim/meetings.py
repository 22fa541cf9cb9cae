"""Simulated collectives: which workers have arrived with what, and which wait for others."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from sim.timeline import GroupBroken, Thread

Key = tuple[str, int, int]
"""The kind of a collective, its generation and, of a vote, its step."""


class Waiting(NamedTuple):
    thread: Thread
    needs: frozenset[str]


@dataclass
class Meeting:
    """One collective; a worker continues once all workers that it needs have arrived."""

    everyone: frozenset[str]
    brought: dict[str, Any] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)


class Meetings:
    """All collectives under way."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._meetings: dict[Key, Meeting] = {}

    def come(
        self,
        key: Key,
        worker: str,
        thread: Thread,
        everyone: frozenset[str],
        brings: Any = None,
        needs: frozenset[str] | None = None,
    ) -> None:
        """Arrive. The thread wakes with everything brought once the workers that it needs have
        arrived."""
        meeting = self._meetings.setdefault(key, Meeting(everyone))
        meeting.brought[worker] = brings
        meeting.waiting[worker] = Waiting(thread, everyone if needs is None else needs)
        ready = [
            w for w, (_, needed) in meeting.waiting.items() if needed <= meeting.brought.keys()
        ]
        for name in ready:
            meeting.waiting.pop(name).thread.wake(dict(meeting.brought), self._latency_s())
        if not meeting.waiting and len(meeting.brought) == len(everyone):
            del self._meetings[key]

    def leave(self, worker: str) -> None:
        """A worker that unwinds or dies withdraws what no other worker has received yet."""
        for meeting in self._meetings.values():
            meeting.brought.pop(worker, None)
            meeting.waiting.pop(worker, None)

    def break_connections(self, dead: str) -> None:
        """Some peers of a dead worker notice at once; others block until they are aborted."""
        for meeting in self._meetings.values():
            if dead in meeting.everyone:
                for waiting in meeting.waiting.values():
                    if self._random.random() < 0.5:
                        delay_s = self._random.uniform(0.001, 0.13)
                        waiting.thread.interrupt(GroupBroken("Connection closed by peer"), delay_s)

    def _latency_s(self) -> float:
        if self._random.random() < 0.1:
            return self._random.uniform(0.02, 0.2)
        return self._random.uniform(0.0005, 0.004)
