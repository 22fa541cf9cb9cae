"""What the controller's shell needs of the world: to start, command, probe and end workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, assert_never

import psutil

from elastic.protocol.commands import (
    Abort,
    ForgetSnapshots,
    Form,
    Order,
    Pause,
    QuerySnapshotServers,
    RequestCheckpoint,
    Reshard,
    Resume,
    RollForward,
    SaveCheckpoint,
    SendRecords,
    StartSnapshots,
    StartSnapshotServer,
    StartStore,
    StartWorkers,
    StopSnapshotServer,
    StopWorker,
)
from elastic.protocol.controller_state import CoreState

T = TypeVar("T")


class Fleet(Protocol):
    """Workers and the store, however they run; what happens to them comes back as events."""

    def start_store(self) -> None:
        """Answered by `StoreReady`; later, perhaps, `StoreLost`."""

    def start_workers(self, workers: Sequence[str], quarantined: Sequence[str] = ()) -> None:
        """Each is answered by `WorkerReady`, or by `WorkerLost`; none is started on the nodes
        `avoided`: who finds no other waits for one."""

    def start_snapshot_server(self, node: str) -> None:
        """Answered by `SnapshotServerReady`, or later by `SnapshotServerLost`."""

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        """Each is answered by `SnapshotServerReported`, if it lives."""

    def forget_snapshots(self, nodes: Sequence[str], generation: int) -> None:
        """Free what is of earlier generations."""

    def stop_worker(self, worker: str) -> None:
        """End a process at once, even a stopped one; answered by `WorkerLost`."""

    def send(self, workers: Iterable[str], order: Order) -> None:
        """Orders for one worker arrive in the order in which they were sent."""

    def probe(self, worker: str) -> Future[int]:
        """Ask for the worker's number of signs of life."""

    def process_state(self, worker: str) -> Future[str]:
        """Ask the worker's node what its process does: `runs`, `stopped` (by a signal) or `gone`;
        `may run` where there is nobody to ask."""

    def probe_snapshot_server(self, node: str) -> Future[None]:
        """Ask the node's keeper for an answer, of whatever kind."""

    def stop_snapshot_server(self, node: str) -> None:
        """End a process, even a stopped one; answered by `SnapshotServerLost`."""

    def close(self) -> None:
        """End every process; return when none is left (invariant 12)."""


def missing(name: str) -> Future[Any]:
    """The answer of a process that is not there."""
    answer: Future[Any] = Future()
    answer.set_exception(ProcessLookupError(name))
    return answer


def answered(value: T) -> Future[T]:
    """An answer that is there at once."""
    answer: Future[T] = Future()
    answer.set_result(value)
    return answer


class Survivors(Protocol):
    """What a controller that died has left alive, and the fleet of the next one can find."""

    def newest_generation(self) -> int:
        """Of all orders that workers have taken; those that do not answer do not count."""

    def attach(self, state: CoreState) -> None:
        """Take over what lives of that which should be there; what has gone is told as lost, what
        has never come is started. Workers tell once more what may not have been heard."""

    def clear_away(self) -> None:
        """End all of it."""


def process_state(pid: int) -> str:
    """`runs`, `stopped` by a signal, or `gone`, of a process of this machine."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status == psutil.STATUS_STOPPED else "runs"


ToWorkers = (
    Abort | RollForward | Reshard | Pause | StartSnapshots | RequestCheckpoint | SaveCheckpoint
)

FleetCommand = (
    StartStore
    | StartWorkers
    | StopWorker
    | Form
    | Resume
    | ToWorkers
    | SendRecords
    | StartSnapshotServer
    | StopSnapshotServer
    | QuerySnapshotServers
    | ForgetSnapshots
)


def pass_on(fleet: Fleet, command: FleetCommand) -> None:
    """Have the fleet do it; it returns at once."""
    match command:
        case StartStore():
            fleet.start_store()
        case StartWorkers():
            fleet.start_workers(command.workers, command.quarantined)
        case StopWorker():
            fleet.stop_worker(command.worker)
        case Form():
            fleet.send(command.plan.participants, command)
        case Resume():
            fleet.send((*command.workers, *command.released), command)
        case (
            Abort()
            | RollForward()
            | Reshard()
            | Pause()
            | StartSnapshots()
            | RequestCheckpoint()
            | SaveCheckpoint()
            | SendRecords()
        ):
            fleet.send(command.workers, command)
        case StartSnapshotServer():
            fleet.start_snapshot_server(command.node)
        case StopSnapshotServer():
            fleet.stop_snapshot_server(command.node)
        case QuerySnapshotServers():
            fleet.query_snapshot_servers(command.nodes, command.generation)
        case ForgetSnapshots():
            fleet.forget_snapshots(command.nodes, command.generation)
        case _:
            assert_never(command)
