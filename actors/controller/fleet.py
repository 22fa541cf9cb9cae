"""The fleet protocol: how the controller's shell starts, commands, probes and ends processes.

Every backend implements `Fleet`. A backend whose processes outlive a controller also implements
`Survivors`. `dispatch` maps each command of the core to a method of the fleet.
"""

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
from elastic.protocol.controller_state import ControllerState

T = TypeVar("T")


class Fleet(Protocol):
    """Workers, snapshot servers and the store; their outcomes come back as events."""

    def start_store(self) -> None:
        """Start the store. `StoreReady` answers; `StoreLost` may follow later."""

    def start_workers(self, command: StartWorkers) -> None:
        """Start workers, which measure their links with its peers. `WorkerReady` or `WorkerLost`
        answers for each. No worker starts on a quarantined node, nor on one of another market; a
        worker that finds no other node waits for one. A fleet that knows markets posts
        `WorkerPlaced` once a worker has its node."""

    def start_snapshot_server(self, node: str) -> None:
        """Start a node's snapshot server. `SnapshotServerReady` or `SnapshotServerLost` answers."""

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        """Query what snapshot servers hold. Each one alive answers by `SnapshotServerReported`."""

    def forget_snapshots(self, nodes: Sequence[str], generation: int, kept_generation: int) -> None:
        """Free the snapshots of earlier generations, except those of `kept_generation`."""

    def stop_worker(self, worker: str) -> None:
        """End a process at once, even a stopped one. `WorkerLost` answers."""

    def send(self, workers: Iterable[str], order: Order) -> None:
        """Send an order. A worker gets its orders in the order in which they were sent."""

    def probe(self, worker: str) -> Future[int]:
        """Query a worker's count of signs of life."""

    def process_state(self, worker: str) -> Future[str]:
        """Query the worker's node for the state of its process: `runs`, `stopped` (by a signal) or
        `gone`; `may run` if there is no agent to query."""

    def probe_snapshot_server(self, node: str) -> Future[None]:
        """Query the node's snapshot server for any answer."""

    def stop_snapshot_server(self, node: str) -> None:
        """End a process, even a stopped one. `SnapshotServerLost` answers."""

    def close(self) -> None:
        """End every process; return when none is left (invariant 12)."""


class Survivors(Protocol):
    """The live processes of a dead controller, as the fleet of its successor finds them. In the
    glossary a survivor is only a worker of an aborted generation."""

    def newest_generation(self) -> int:
        """The newest generation of all orders that workers have; silent workers do not count."""

    def attach(self, state: ControllerState) -> None:
        """Take over the processes that `state` expects and that still live. Report those that died
        as lost, and start those that never started. Workers report again what the dead controller
        may not have received."""

    def end_survivors(self) -> None:
        """End every survivor."""


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


def dispatch(fleet: Fleet, command: FleetCommand) -> None:
    """Pass a command to the fleet, which returns at once."""
    match command:
        case StartStore():
            fleet.start_store()
        case StartWorkers():
            fleet.start_workers(command)
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
            fleet.forget_snapshots(command.nodes, command.generation, command.kept_generation)
        case _:
            assert_never(command)


def process_state(pid: int) -> str:
    """The state of a process of this machine: `runs`, `stopped` (by a signal) or `gone`."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status == psutil.STATUS_STOPPED else "runs"


def answered(value: T) -> Future[T]:
    """A future that has its answer already."""
    answer: Future[T] = Future()
    answer.set_result(value)
    return answer


def missing(name: str) -> Future[Any]:
    """The future of a process that does not exist: it raises `ProcessLookupError`."""
    answer: Future[Any] = Future()
    answer.set_exception(ProcessLookupError(name))
    return answer
