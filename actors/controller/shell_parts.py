"""The parts through which a shell reaches the outside: clocks, inbox, logs, threads.

The simulator in `tests/sim` replaces them, and drives the same shell through simulated time.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from actors.controller.compaction import Compactor
from actors.controller.fleet import Fleet
from actors.controller.journal import open_journal
from actors.controller.publisher import Publisher, StorageOrder
from actors.controller.watch import Watch
from actors.storage.checkpoint_files import FoundCheckpoints, find_checkpoints
from actors.storage.file_names import JOURNAL, METRICS, SYSTEM
from actors.storage.lease import Lease
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import Lines, open_lines
from actors.storage.storage import DiskStorage, Storage
from elastic.controller.core import Core
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Event, NodeDraining, PartWritten

Clock = Callable[[], float]
Post = Callable[[Event], None]


class RunClock:
    """The run's clock: monotonic time with an offset, in seconds since the epoch.

    The offset to the wall clock is taken once. If the journal is ahead of the wall clock, time
    continues from its last line. Else every deadline would wait until the wall clock catches up.
    """

    def __init__(
        self, last: float, wall: Clock = time.time, monotonic: Clock = time.monotonic
    ) -> None:
        """`last` is the time of the journal's last line, 0 if there is none."""
        self._wall, self._monotonic = wall, monotonic
        self._offset = max(wall(), last) - monotonic()

    def now(self) -> float:
        return self._offset + self._monotonic()

    def on_this_clock(self, event: Event) -> Event:
        """Convert the deadline of a drain, which is given in this machine's wall time, to this
        clock; leave other events alone."""
        if isinstance(event, NodeDraining):
            return replace(event, deadline=self.now() + event.deadline - self._wall())
        return event


class Inbox(Protocol):
    """The events that wait for the shell; any thread may add one."""

    def put(self, event: Event) -> None:
        """Add an event."""

    def get(self, *, timeout: float) -> Event:
        """Take the oldest event. Raises `queue.Empty` if none arrives for `timeout` seconds."""

    def empty(self) -> bool:
        """Whether no event waits."""


class JoinedInbox:
    """An inbox that joins reports of one checkpoint that wait one behind the other: a thousand
    workers that have written their parts are one event, and one line of the journal."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._next: Event | None = None
        """An event that was taken and did not join the one before it."""

    def put(self, event: Event) -> None:
        self._inbox.put(event)

    def empty(self) -> bool:
        return self._next is None and self._inbox.empty()

    def get(self, *, timeout: float) -> Event:
        event, self._next = self._next, None
        if event is None:
            event = self._inbox.get(timeout=timeout)
        if not isinstance(event, PartWritten):
            return event
        label, others = (event.generation, event.step), list(event.others)
        while self._next is None and not self._inbox.empty():
            following = self._inbox.get(timeout=0.0)
            if isinstance(following, PartWritten) and label == (
                following.generation,
                following.step,
            ):
                others += following.parts
            else:
                self._next = following
        return replace(event, others=tuple(others)) if others else event


class Detector(Protocol):
    """The failure detector, as the shell uses it."""

    def note(self, event: Event) -> None:
        """Note an event before the core handles it."""

    def note_members(self, workers: Iterable[str]) -> None:
        """Note the workers that train from now on."""

    def close(self) -> None:
        """End its thread."""


class StorageOrders(Protocol):
    """The publisher of checkpoints, as the shell uses it."""

    def order(self, command: StorageOrder) -> None:
        """Queue an order. Its outcome is an event."""

    def close(self) -> None:
        """Finish the queued orders, then end the thread."""


def open_metrics(metrics: LineLog, lease: Lease) -> Lines:
    """Append to the metrics. Raises OSError and `LeaseFilesMissing`."""
    return open_lines(metrics, lease.epoch, lease.check_now)


def open_detector(fleet: Fleet, post: Post, state: ControllerState, silence_s: float) -> Detector:
    """Start the failure detector; the members in `state` may be training already."""
    members, step_s = state.live.members(), state.steps.measured.median_s()
    return Watch(fleet, post, silence_s, state.generation, members, step_s)


def open_compactor(run: Storage, lease: Lease) -> Compactor | None:
    """Start compaction if the run is on an object store, where a log is many objects."""
    if isinstance(run, DiskStorage):
        return None
    others = LineLog(run, METRICS), LineLog(run, SYSTEM)
    return Compactor(LineLog(run, JOURNAL), others, lease.check_now)


@dataclass(frozen=True)
class ShellParts:
    """The parts of a shell; the defaults are those of a real run."""

    wall: Clock = time.time
    monotonic: Clock = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    look_every_s: float = 2.0
    """How often the shell looks after lease and logs while no events arrive."""
    make_core: Callable[[ControllerState], Core] = Core
    make_inbox: Callable[[], Inbox] = queue.Queue
    open_journal: Callable[[LineLog, Lease], Lines] = open_journal
    open_metrics: Callable[[LineLog, Lease], Lines] = open_metrics
    find_checkpoints: Callable[[Storage], FoundCheckpoints] = find_checkpoints
    open_detector: Callable[[Fleet, Post, ControllerState, float], Detector] = open_detector
    open_publisher: Callable[[Storage, Lease, Post], StorageOrders] = Publisher
    open_compactor: Callable[[Storage, Lease], Compactor | None] = open_compactor
