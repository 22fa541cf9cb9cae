"""Pending commands: those that a restarted controller sends again, in case they were lost.

Commands that start workers or servers are not among them: the core's state determines those.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from elastic.protocol.commands import (
    Command,
    DropCheckpoints,
    ForgetSnapshots,
    Form,
    Order,
    QuerySnapshotServers,
    RequestCheckpoint,
    Reshard,
    SendRecords,
    SetAside,
    StartSnapshots,
    Stopped,
    StopWorker,
)
from elastic.protocol.controller_events import CheckpointsRemoved
from elastic.protocol.events import Event, RunOpened, StepCommitted

Repeatable = Order | QuerySnapshotServers | ForgetSnapshots
SUPERSEDING = (StartSnapshots, RequestCheckpoint, QuerySnapshotServers)
"""Of each of these classes only the newest command since the last `Form` counts."""


@dataclass(slots=True)
class PendingCommands:
    """The pending commands; every full state line of the journal has them beside the state."""

    orders: list[Repeatable] = field(default_factory=list)
    """The orders since the newest `Form`, without `Form` and `Reshard` once a step has committed:
    by then all members have carried them out."""
    stops: list[StopWorker] = field(default_factory=list)
    removals: list[tuple[int, int]] = field(default_factory=list)
    """Step and generation of checkpoints whose removal storage has not confirmed."""
    set_aside: list[SetAside] = field(default_factory=list)
    """Damaged checkpoints that may still be visible."""
    stopped: Stopped | None = None
    """How this session of the run has ended, if it has."""

    def note(self, event: Event, commands: Sequence[Command]) -> None:
        """Note an event and the commands that it led to."""
        match event:
            case RunOpened():
                self._begin()
            case CheckpointsRemoved():
                self._confirm(set(event.removed))
            case StepCommitted():
                self._forget_forming(event.generation)
        if any(isinstance(command, Form) for command in commands):
            self.orders = []
        for command in commands:
            match command:
                case StopWorker():
                    self.stops.append(command)
                case DropCheckpoints():
                    self.removals += [key for key in command.dropped if key not in self.removals]
                case SetAside():
                    self.set_aside.append(command)
                case Stopped():
                    self.stopped = command
                case SendRecords():
                    pass  # on `ControllerRestarted` the core requests them again
                case _ if isinstance(command, Order | QuerySnapshotServers | ForgetSnapshots):
                    self._add(command)

    def commands_to_repeat(self, worker_records: Set[str]) -> list[Command]:
        """The commands to send again, in order; a receiver that has carried one out ignores it."""
        stops = [stop for stop in self.stops if stop.worker in worker_records]
        drops = [DropCheckpoints(tuple(self.removals))] if self.removals else []
        snapshot_orders = [order for order in self.orders if isinstance(order, StartSnapshots)]
        others = [order for order in self.orders if not isinstance(order, StartSnapshots)]
        return [*stops, *drops, *self.set_aside, *others, *snapshot_orders]

    def drop_ended(self, worker_records: Set[str]) -> None:
        """Forget the orders to stop workers that are gone."""
        self.stops = [stop for stop in self.stops if stop.worker in worker_records]

    def _begin(self) -> None:
        """Clear all: a new session begins, and nothing of the previous one lives."""
        self.orders, self.stops, self.removals, self.set_aside = [], [], [], []
        self.stopped = None

    def _add(self, command: Repeatable) -> None:
        if isinstance(command, SUPERSEDING):
            self.orders = [order for order in self.orders if type(order) is not type(command)]
        elif isinstance(command, ForgetSnapshots):
            self.orders = [
                order
                for order in self.orders
                if not isinstance(order, ForgetSnapshots) or order.nodes != command.nodes
            ]
        self.orders.append(command)

    def _confirm(self, removed: set[tuple[int, int]]) -> None:
        self.removals = [key for key in self.removals if key not in removed]
        self.set_aside = [c for c in self.set_aside if (c.step, c.generation) not in removed]

    def _forget_forming(self, generation: int) -> None:
        first = self.orders[0] if self.orders else None
        if isinstance(first, Form) and first.generation == generation:
            self.orders = [o for o in self.orders if not isinstance(o, Form | Reshard)]
