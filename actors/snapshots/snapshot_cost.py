"""What snapshots cost: the time that they add to the steps of the training thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, median_low

MIN_SNAPSHOTS = 4
"""So many must be measured: the first ones open connections and touch new memory."""
MIN_COPIES = 2
NUM_SNAPSHOTS = 8
NUM_STEPS = 32
"""The latest snapshots and steps of which medians are taken."""


class SnapshotCost:
    """Used by the training thread. A snapshot begins at a step boundary, and what it adds to the
    step until the next boundary is its cost."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._costs_s: deque[float] = deque(maxlen=NUM_SNAPSHOTS)
        self._copies_s: deque[float] = deque(maxlen=NUM_SNAPSHOTS)
        self._steps_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._boundary_s: float | None = None
        self._spent_s = 0.0
        self._has_begun = False

    @contextmanager
    def spending(self) -> Iterator[None]:
        """The time inside is spent on snapshots."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._spent_s += self._clock() - began_s

    def end_step(self) -> None:
        """A step boundary: count the step that ends here."""
        now_s = self._clock()
        if self._boundary_s is not None:
            self._steps_s.append(now_s - self._boundary_s - self._spent_s)
            if self._has_begun:
                self._costs_s.append(self._spent_s)
        self._boundary_s, self._spent_s, self._has_begun = now_s, 0.0, False

    def note_begun(self) -> None:
        """A snapshot has begun at this boundary."""
        self._has_begun = True

    def note_copied(self, seconds: float) -> None:
        """A snapshot was complete at all servers so long after it had begun."""
        self._copies_s.append(seconds)

    def forget_snapshots(self) -> None:
        """Other servers or another interval: what earlier snapshots took no longer counts."""
        self._costs_s.clear()
        self._copies_s.clear()
        self._has_begun = False

    def end_generation(self) -> None:
        """Forget all: parts and steps of the next generation have other sizes."""
        self.forget_snapshots()
        self._steps_s.clear()
        self._boundary_s, self._spent_s = None, 0.0

    @property
    def share(self) -> float | None:
        """The cost of a snapshot relative to a step without; None before enough are measured."""
        step_s = median(self._steps_s) if self._steps_s else 0.0
        if len(self._costs_s) < MIN_SNAPSHOTS or step_s <= 0.0:
            return None
        return median(self._costs_s) / step_s

    def num_steps(self, patience_s: float) -> float | None:
        """How many steps a snapshot takes until it is complete; 0 if the next vote can wait for it,
        which it does up to `patience_s`. None before enough are measured."""
        step_s = median(self._steps_s) if self._steps_s else 0.0
        if len(self._copies_s) < MIN_COPIES or step_s <= 0.0:
            return None
        copy_s = median_low(self._copies_s)
        return copy_s / step_s if copy_s > step_s + patience_s else 0.0
