"""Which snapshots the simulated snapshot servers hold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from elastic.protocol.commands import StartSnapshots
from elastic.reshard.snapshot_placement import Slot


@dataclass(slots=True)
class SnapshotRecord:
    """The snapshots of the members: the two newest steps, which all servers of an order hold.

    A snapshot is complete once it has taken `copy_s`, or once the next step commits.
    """

    every: int = 0
    copy_s: float = 0.0
    order: StartSnapshots | None = None
    """The newest order."""
    _kept_order: StartSnapshots | None = None
    """The order under which the kept snapshots were taken."""
    _steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=2))
    """The newest snapshots: step, and when each began."""
    _ended_s: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot of the present order is under way or complete."""
        return self.order is not None and self.order is self._kept_order

    def begin_generation(self, generation: int) -> None:
        """Snapshots of earlier generations stay until this one takes its first."""
        if self.order is not None and self.order.generation != generation:
            self.order = None

    def note_step(self, step: int, now: float) -> None:
        """Begin a snapshot of a committed step, if one is due."""
        order = self.order
        if order is None or not any(order.snapshot_servers):
            return
        every = order.every or self.every
        if not every or step % every:
            return
        if order is not self._kept_order:
            self._kept_order = order
            self._steps.clear()
        self._ended_s = None
        self._steps.append((step, now))

    def end(self, now: float) -> None:
        """The members stop: a snapshot that is not complete yet never will be."""
        if self._ended_s is None:
            self._ended_s = now

    def slots(self, node: str) -> tuple[Slot, ...]:
        """What the snapshot server of a node holds."""
        order = self._kept_order
        if order is None:
            return ()
        whole = [
            step
            for index, (step, begun_s) in enumerate(self._steps)
            if index + 1 < len(self._steps)
            or self._ended_s is None
            or self._ended_s - begun_s >= self.copy_s
        ]
        return tuple(
            Slot(worker, order.generation, step)
            for worker, servers in zip(order.workers, order.snapshot_servers, strict=True)
            if any(server.node == node for server in servers)
            for step in whole
        )
