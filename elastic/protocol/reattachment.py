"""What a worker keeps so that its controller may die: what it has told, which orders it took."""

from __future__ import annotations

from collections import deque
from heapq import merge

from elastic.protocol.commands import Form, Order, RequestCheckpoint, SendRecords, StartSnapshots
from elastic.protocol.events import Event, PartFailed, PartWritten, StepCommitted
from elastic.protocol.step_records import RecordsSent

NUM_KEPT_EVENTS = 4096
NUM_KEPT_PARTS = 16
"""Uploads outlive a generation, and few are under way at a time."""


class Outbox:
    """What a worker has told in its present generation, in order; not safe for two threads.

    Of what there is too much the oldest is dropped. The reports of steps, of which there are most,
    do not displace others: `RecordRing` has what is dropped of them.
    """

    def __init__(self, incarnation: int, num_kept: int = NUM_KEPT_EVENTS) -> None:
        """`incarnation` is of the controller that it tells."""
        self.incarnation = incarnation
        self._generation = 0
        self._num_told = 0
        self._told: deque[tuple[int, Event]] = deque(maxlen=NUM_KEPT_EVENTS)
        self._steps: deque[tuple[int, StepCommitted]] = deque(maxlen=num_kept)

    def add(self, event: Event) -> None:
        self._num_told += 1
        if isinstance(event, StepCommitted):
            self._steps.append((self._num_told, event))
        elif not isinstance(event, RecordsSent):  # they are asked for again
            self._told.append((self._num_told, event))

    def note(self, incarnation: int, order: Order) -> None:
        """An order is about to be taken. Whoever wants a generation formed knows what was told
        before, but perhaps not of parts written."""
        is_new = incarnation >= self.incarnation and order.generation > self._generation
        if not isinstance(order, Form) or not is_new:
            return
        self._generation = order.generation
        parts = [told for told in self._told if isinstance(told[1], PartWritten | PartFailed)]
        self._told = deque(parts[-NUM_KEPT_PARTS:], NUM_KEPT_EVENTS)
        self._steps.clear()

    def again(self, incarnation: int, committed_step: int) -> list[Event]:
        """What is to be told to another controller, which knows of the steps up to this one."""
        self.incarnation = max(self.incarnation, incarnation)
        steps = [told for told in self._steps if told[1].record.step > committed_step]
        return [event for _, event in merge(self._told, steps, key=lambda told: told[0])]


class Intake:
    """Takes each order once, whoever sends it again, and none of an older controller's
    (invariant 6)."""

    def __init__(self) -> None:
        self.generation = 0
        """The newest that an order was of."""
        self._incarnation = 0
        self._taken: set[tuple[str, int, int]] = set()

    def meet(self, incarnation: int) -> None:
        """Another controller has the run: from now on only it is obeyed."""
        self._incarnation = max(self._incarnation, incarnation)

    def takes(self, incarnation: int, order: Order) -> bool:
        if incarnation < self._incarnation:
            return False
        self._incarnation = incarnation
        self.generation = max(self.generation, order.generation)
        if isinstance(order, StartSnapshots | SendRecords):
            return True  # the last one counts
        step = order.step if isinstance(order, RequestCheckpoint) else 0
        key = (type(order).__name__, order.generation, step)
        if key in self._taken:
            return False
        if isinstance(order, Form):
            self._taken = {taken for taken in self._taken if taken[1] >= order.generation}
        self._taken.add(key)
        return True
