"""Reattachment to a restarted controller: a worker's reported events and accepted orders."""

from __future__ import annotations

from collections import deque
from heapq import merge

from elastic.protocol.commands import Form, Order, RequestCheckpoint, SendRecords, StartSnapshots
from elastic.protocol.events import Event, PartFailed, PartWritten, StepCommitted
from elastic.protocol.step_records import RecordsSent

NUM_KEPT_EVENTS = 4096
NUM_KEPT_PARTS = 16
"""Reports of parts kept across generations: uploads outlive a generation, and few run at a time."""


class Outbox:
    """The events that a worker has reported in its current generation, in order; not thread-safe.

    If there are too many, the oldest are dropped. Step reports, the most frequent events, do not
    displace other events; `RecordRing` still has the records of dropped step reports.
    """

    def __init__(self, incarnation: int, num_kept: int = NUM_KEPT_EVENTS) -> None:
        """`incarnation` is that of the controller to which the worker reports."""
        self.incarnation = incarnation
        self._generation = 0
        self._num_reported = 0
        self._reports: deque[tuple[int, Event]] = deque(maxlen=NUM_KEPT_EVENTS)
        self._steps: deque[tuple[int, StepCommitted]] = deque(maxlen=num_kept)

    def add(self, event: Event) -> None:
        self._num_reported += 1
        if isinstance(event, StepCommitted):
            self._steps.append((self._num_reported, event))
        elif not isinstance(event, RecordsSent):  # a restarted controller requests them again
            self._reports.append((self._num_reported, event))

    def note(self, incarnation: int, order: Order) -> None:
        """Note an order before the worker takes it.

        A controller that forms a new generation knows the earlier reports, except perhaps those of
        written parts, so all others are dropped.
        """
        is_new = incarnation >= self.incarnation and order.generation > self._generation
        if not isinstance(order, Form) or not is_new:
            return
        self._generation = order.generation
        parts = [item for item in self._reports if isinstance(item[1], PartWritten | PartFailed)]
        self._reports = deque(parts[-NUM_KEPT_PARTS:], NUM_KEPT_EVENTS)
        self._steps.clear()

    def events_to_repeat(self, incarnation: int, committed_step: int) -> list[Event]:
        """The events to report again to a restarted controller that knows the committed steps up to
        `committed_step`."""
        self.incarnation = max(self.incarnation, incarnation)
        steps = [item for item in self._steps if item[1].record.step > committed_step]
        return [event for _, event in merge(self._reports, steps, key=lambda item: item[0])]


class Intake:
    """Accepts each order once, even if it is sent again, and no order of an older controller
    (invariant 6)."""

    def __init__(self) -> None:
        self.generation = 0
        """The newest generation of any accepted order."""
        self._incarnation = 0
        self._accepted: set[tuple[str, int, int]] = set()

    def meet(self, incarnation: int) -> None:
        """Note that another controller has taken the run: only its orders count from now on."""
        self._incarnation = max(self._incarnation, incarnation)

    def takes(self, incarnation: int, order: Order) -> bool:
        """Whether the worker must carry out this order."""
        if incarnation < self._incarnation:
            return False
        self._incarnation = incarnation
        self.generation = max(self.generation, order.generation)
        if isinstance(order, StartSnapshots | SendRecords):
            return True  # the last order counts
        step = order.step if isinstance(order, RequestCheckpoint) else 0
        key = (type(order).__name__, order.generation, step)
        if key in self._accepted:
            return False
        if isinstance(order, Form):
            self._accepted = {other for other in self._accepted if other[1] >= order.generation}
        self._accepted.add(key)
        return True
