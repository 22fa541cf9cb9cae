"""The core's commands as calls of the fleet."""

from __future__ import annotations

from typing import assert_never

from actors.fleet import Fleet
from elastic.commands import (
    Abort,
    AskKeepers,
    ForgetSnapshots,
    Form,
    Pause,
    Protect,
    Relayout,
    Resume,
    SaveCheckpoint,
    SendRecords,
    Settle,
    StartKeeper,
    StartStore,
    StartWorkers,
    StopKeeper,
    StopWorker,
    WishCheckpoint,
)

ToWorkers = Abort | Settle | Relayout | Pause | Protect | WishCheckpoint | SaveCheckpoint
FleetCommand = (
    StartStore
    | StartWorkers
    | StopWorker
    | Form
    | Resume
    | ToWorkers
    | SendRecords
    | StartKeeper
    | StopKeeper
    | AskKeepers
    | ForgetSnapshots
)


def pass_on(fleet: Fleet, command: FleetCommand) -> None:
    """Have the fleet do it; it returns at once."""
    match command:
        case StartStore():
            fleet.start_store()
        case StartWorkers():
            fleet.start_workers(command.workers, command.avoided)
        case StopWorker():
            fleet.stop_worker(command.worker)
        case Form():
            fleet.send(command.plan.participants, command)
        case Resume():
            fleet.send((*command.workers, *command.released), command)
        case (
            Abort()
            | Settle()
            | Relayout()
            | Pause()
            | Protect()
            | WishCheckpoint()
            | SaveCheckpoint()
            | SendRecords()
        ):
            fleet.send(command.workers, command)
        case StartKeeper():
            fleet.start_keeper(command.node)
        case StopKeeper():
            fleet.stop_keeper(command.node)
        case AskKeepers():
            fleet.ask_keepers(command.nodes, command.generation)
        case ForgetSnapshots():
            fleet.forget_snapshots(command.nodes, command.generation)
        case _:
            assert_never(command)
