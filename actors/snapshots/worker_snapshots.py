"""One worker's snapshots: copied to its keepers while the next step computes; runs without Ray.

A snapshot is begun after an apply and whole at all keepers before the next vote: whoever has read a
vote knows that the snapshot before it is whole everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from actors.runtime.faults import FaultInjector
from actors.snapshots.buffer import NOTHING
from actors.snapshots.memory_layout import MemoryLayout, sizes_of
from actors.snapshots.side_stream import held_still
from actors.snapshots.sink import Sink, Taking
from elastic.geometry.assignment import Assignment
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.commands import StartSnapshots
from elastic.reshard.parity import ballot_of

LOOK_EVERY_S = 0.02
PATIENCE_S = 5.0
"""How long a vote waits for a snapshot that cannot become whole, once."""


class Snapshots:
    """Told where by the control thread, begun and awaited by the training thread."""

    def __init__(
        self,
        worker: str,
        node: str,
        specs: Sequence[TensorSpec],
        every: int,
        faults: FaultInjector | None = None,
        *,
        secret: bytes,
    ) -> None:
        """`secret` is the run's, which every keeper of it knows."""
        self._secret = secret
        self._faults = faults or FaultInjector(worker)
        self._worker, self._node, self._specs, self._every = worker, node, specs, every
        self._order: StartSnapshots | None = None
        self._sink: Sink | None = None
        self._under_way: Taking | None = None
        self._kept_step = self._due_step = NOTHING
        self._is_patient = True

    def protect(self, order: StartSnapshots) -> None:
        """Take them to these keepers from the next boundary on; from any thread."""
        self._order = order

    @property
    def are_whole(self) -> bool:
        """Whether the newest that was due is whole at every keeper."""
        taking = self._under_way
        return taking is not None and taking.is_whole and taking.step == self._due_step

    @property
    def ballot(self) -> float:
        """What this worker adds to a vote; `elastic.parity.num_whole` reads the sum."""
        return ballot_of(self._sink.order.num_changes) if self._sink and self.are_whole else 0.0

    def note_vote(self, num_whole: int, num_members: int) -> None:
        """What is whole everywhere is kept until something newer is."""
        if num_whole == num_members:
            self._kept_step = self._due_step

    def take(self, step: int, assignment: Assignment, tensors: Mapping[str, Tensor]) -> None:
        """Begin one, if it is due and no older one is still under way."""
        order = self._order
        if order is None or order.generation != assignment.generation or step % self._every:
            return
        self._due_step = step
        if self._sink is None or self._sink.order is not order:
            self._leave_sink()
            plan = MemoryLayout.of(self._specs, assignment, self._worker)
            mates = next((workers for workers in order.sets if self._worker in workers), ())
            sizes = sizes_of(self._specs, assignment, mates)
            self._sink = Sink(
                order, self._worker, self._node, plan, sizes, self._faults, self._secret
            )
        elif self._under_way and not self._under_way.done.is_set():
            return
        if not self._sink.snapshot_servers:
            self._under_way = None
            return
        still = held_still(self._specs, tensors)
        self._under_way = Taking(step, self._kept_step, assignment, still)
        self._sink.begin(self._under_way)

    def await_whole(self, check: Callable[[], None]) -> None:
        """Before a vote; `check` may raise meanwhile. Raises what broke the copying.

        If a keeper is gone, the controller is given some time to name another.
        """
        deadline = time.monotonic() + PATIENCE_S * self._is_patient
        while (taking := self._under_way) and not taking.is_whole:
            if taking.error:
                raise taking.error
            if taking.done.wait(LOOK_EVERY_S) and not taking.is_whole:
                if self._sink and self._order is not self._sink.order:
                    self.take(taking.step, taking.assignment, taking.tensors)
                else:
                    time.sleep(LOOK_EVERY_S)
            if time.monotonic() > deadline:
                self._is_patient = False  # until there is a whole one
                return
            check()
        self._is_patient = True

    def await_copied(self) -> None:
        """Before anything changes the tensors: they have been read, or will not be."""
        if self._under_way:
            self._under_way.roll_forward()

    def end_generation(self) -> None:
        self._leave_sink()
        self._order, self._is_patient = None, True
        self._kept_step = self._due_step = NOTHING

    def _leave_sink(self) -> None:
        self.await_copied()
        if self._sink is not None:
            self._sink.close()
        self._sink = self._under_way = None
