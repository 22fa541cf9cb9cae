"""One worker's snapshots: copied to its snapshot servers while the next step computes.

A snapshot begins after an apply and is complete at all servers before the next vote. So a worker
that has read a vote knows that the snapshot before it is complete everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from actors.host_memory.host_copy import clone_buffers
from actors.runtime.faults import FaultInjector
from actors.snapshots.buffer import NO_STEP
from actors.snapshots.memory_layout import MemoryLayout, sizes_of
from actors.snapshots.sink import PendingSnapshot, Sink
from actors.snapshots.snapshot_cost import SnapshotCost
from elastic.geometry.assignment import Assignment
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.commands import StartSnapshots
from elastic.protocol.events import Event
from elastic.protocol.snapshot_events import SnapshotTimed
from elastic.reshard.snapshot_interval import AUTO_EVERY, MARGIN, interval_for

POLL_EVERY_S = 0.02
PATIENCE_S = 5.0
"""How long one vote waits for a snapshot."""


class Snapshots:
    """The control thread sets the servers; the training thread begins and awaits snapshots."""

    def __init__(
        self,
        worker: str,
        node: str,
        specs: Sequence[TensorSpec],
        every: int,
        faults: FaultInjector | None = None,
        *,
        secret: bytes,
        report: Callable[[Event], None] = lambda _: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`every`, the setting, counts unless an order has another interval. A vote waits for a
        snapshot up to `patience_s`. `secret` is the run's, which all its snapshot servers know."""
        self._patience_s = patience_s
        self._report = report
        self._cost = SnapshotCost()
        self._timed: tuple[StartSnapshots, int] | None = None
        """The order under which the cost was reported, and the interval that it called for."""
        self._secret = secret
        self._faults = faults or FaultInjector(worker)
        self._worker, self._node, self._specs, self._every = worker, node, specs, every
        self._order: StartSnapshots | None = None
        self._noted: StartSnapshots | None = None
        """The order that counted at the latest step boundary."""
        self._sink: Sink | None = None
        self._under_way: PendingSnapshot | None = None
        self._kept_step = self._due_step = NO_STEP
        self._held_step = NO_STEP
        """The step of the worker's tensors, until they change."""
        self._is_patient = True

    def start_snapshots(self, order: StartSnapshots) -> None:
        """Send snapshots to these servers from the next step boundary on; from any thread."""
        self._order = order

    @property
    def are_whole(self) -> bool:
        """Whether the newest due snapshot is complete at every server."""
        snapshot = self._under_way
        return snapshot is not None and snapshot.is_whole and snapshot.step == self._due_step

    @property
    def whole_order(self) -> int | None:
        """`num_changes` of the order under which the newest due snapshot is complete, for a vote.

        A snapshot under an earlier order does not count: other workers, which do not have the new
        order yet, may have taken one of a later step under it.
        """
        sink = self._sink
        if sink is None or sink.order is not self._noted or not self.are_whole:
            return None
        return sink.order.num_changes

    def note_vote(self, num_whole: int, num_members: int) -> None:
        """A snapshot that is complete everywhere is kept until a newer one is."""
        if num_whole == num_members:
            self._kept_step = self._due_step

    def begin(self, step: int, assignment: Assignment, tensors: Mapping[str, Tensor]) -> None:
        """Called at each step boundary: begin a snapshot if one is due and no older one is still
        under way."""
        self._held_step = step
        self._cost.end_step()
        self._report_cost()
        with self._cost.spending():
            self._begin(step, assignment, tensors)

    def _begin(self, step: int, assignment: Assignment, tensors: Mapping[str, Tensor]) -> None:
        order = self._order
        if order is None or order.generation != assignment.generation:
            return
        self._noted = order
        if not self._is_due(order, step):
            return
        self._due_step = step
        if self._sink is None or self._sink.order is not order:
            self._close_sink()
            self._cost.forget_snapshots()
            layout = MemoryLayout.of(self._specs, assignment, self._worker)
            members = next((workers for workers in order.sets if self._worker in workers), ())
            sizes = sizes_of(self._specs, assignment, members)
            self._sink = Sink(
                order, self._worker, self._node, layout, sizes, self._faults, self._secret
            )
        elif self._under_way and not self._under_way.done.is_set():
            return
        elif self._under_way and self._under_way.is_whole:
            self._cost.note_copied(self._under_way.copied_s)
        if not self._sink.snapshot_servers:
            self._under_way = None
            return
        still = clone_buffers(self._specs, tensors)
        self._under_way = PendingSnapshot(step, self._kept_step, assignment, still)
        self._sink.begin(self._under_way)
        self._cost.note_begun()

    def _is_due(self, order: StartSnapshots, step: int) -> bool:
        return step % (order.every or self._every) == 0

    def _report_cost(self) -> None:
        """Report what snapshots cost if another interval would suit them, and under the same order
        again only if they call for a longer one."""
        order = self._order
        if order is None or self._sink is None or self._sink.order is not order:
            return
        every = order.every or self._every
        is_longer = every > max(self._every, 1)
        share = self._cost.share
        num_steps = self._cost.num_steps(self._patience_s / (MARGIN if is_longer else 1.0))
        if (share if self._every == AUTO_EVERY else num_steps) is None:
            return
        share, num_steps = share or 0.0, num_steps or 0.0
        wanted = interval_for(share, every, num_steps, self._every)
        if self._timed is not None and self._timed[0] is order:
            is_news = wanted > self._timed[1]
        else:
            is_news = wanted != every
        if is_news:
            self._timed = order, wanted
            self._report(SnapshotTimed(self._worker, order.generation, share, num_steps))

    def await_whole(self, check: Callable[[], None]) -> None:
        """Called before a vote: wait until the snapshot is complete at every server.

        `check` may raise meanwhile. If a server is gone, this waits for the controller to name
        another. It does not wait if snapshots are known to take longer than its patience. Raises
        the exception that broke the copy.
        """
        with self._cost.spending():
            self._await_whole(check)

    def _await_whole(self, check: Callable[[], None]) -> None:
        is_in_vain = not self._is_patient or bool(self._cost.num_steps(self._patience_s))
        deadline = time.monotonic() + (0.0 if is_in_vain else self._patience_s)
        while (snapshot := self._under_way) and not snapshot.is_whole:
            if snapshot.error:
                raise snapshot.error
            if snapshot.done.wait(POLL_EVERY_S) and not snapshot.is_whole:
                order = self._order
                if order and not self._is_due(order, snapshot.step):
                    return  # a longer interval has been ordered meanwhile
                if snapshot.step != self._held_step:
                    return  # its tensors have changed: a later snapshot replaces it
                if self._sink and order is not self._sink.order:
                    self._begin(snapshot.step, snapshot.assignment, snapshot.tensors)
                else:
                    time.sleep(POLL_EVERY_S)
            if time.monotonic() > deadline:
                self._is_patient = False  # until a snapshot is complete again
                return
            check()
        self._is_patient = True

    def await_copied(self) -> None:
        """Called before the tensors change, which a GPU does only once they have been copied."""
        self._held_step = NO_STEP
        with self._cost.spending():
            self._release()

    def _release(self) -> None:
        if self._under_way:
            self._under_way.await_copied()

    def end_generation(self) -> None:
        self._close_sink()
        self._order = self._noted = None
        self._is_patient = True
        self._kept_step = self._due_step = self._held_step = NO_STEP
        self._cost.end_generation()

    def _close_sink(self) -> None:
        if self._under_way:
            self._under_way.stop()
        self._release()
        if self._sink is not None:
            self._sink.close()
        self._sink = self._under_way = None
