"""The controller's shell: one inbox, the core, the journal, and the commands carried out."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.checkpoints import newest_whole, publish
from actors.fleet import Fleet
from actors.journal import LineFile, replay
from actors.lease import Lease
from actors.watch import Watch
from elastic.commands import (
    Abort,
    AskKeepers,
    Command,
    ForgetSnapshots,
    Form,
    LayoutAnswered,
    Pause,
    Protect,
    PublishCheckpoint,
    RecordStep,
    Relaid,
    Relayout,
    Resume,
    RolledBack,
    SaveCheckpoint,
    Settle,
    StartKeeper,
    StartStore,
    StartWorkers,
    Stopped,
    StopWorker,
    Waited,
    Warned,
)
from elastic.core import Core
from elastic.events import Checkpointed, Event, PartFailed, RunOpened, Woke
from elastic.wire import command_line, event_line, state_line

SILENT = (RecordStep,)
"""Commands that need no journal line: their event tells the same."""

LEASE_RENEWAL_S = 2.0


class Shell:
    """Drives one run to its end; `post` may be called from any thread."""

    def __init__(
        self,
        run_folder: Path,
        lease: Lease,
        due: tuple[tuple[int, Event], ...] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`due` are events to be posted once their step has committed."""
        self._due = list(due)
        self._run_folder = run_folder
        self._lease = lease
        self._clock = clock
        self._inbox: queue.Queue[Event] = queue.Queue()
        self._core: Core = replay(run_folder / "journal.jsonl")
        self._journal = LineFile(run_folder / "journal.jsonl")
        self._metrics = LineFile(run_folder / "metrics.jsonl")
        self._now = 0.0
        self._lease_renewed = 0.0
        self._listeners: list[queue.Queue[Command]] = []
        self.outcome: Stopped | None = None
        self.opened = threading.Event()
        """What is posted from now on is of this session of the run."""
        self.ended = threading.Event()
        """Nothing is served any more, whatever the reason."""

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    @contextmanager
    def listening(self) -> Iterator[queue.Queue[Command]]:
        """Each command from now on, once it is durable and under way; for any thread."""
        told: queue.Queue[Command] = queue.Queue()
        self._listeners.append(told)
        try:
            yield told
        finally:
            self._listeners.remove(told)

    def run(self, fleet: Fleet, opening: RunOpened) -> Stopped:
        """Open the run and serve it until it has stopped. `opening.saved` is found here."""
        saved, complaints = newest_whole(self._run_folder, self._core.state.stands)
        for complaint in complaints:
            self._journal.write({"time": self._clock(), "warning": complaint, "format": 1})
        self._fleet = fleet
        watch = Watch(fleet, self.post)
        self.post(dataclasses.replace(opening, incarnation=self._lease.epoch, saved=saved))
        self.opened.set()
        try:
            while self.outcome is None:
                event = self._next_event()
                watch.note(event)
                self._serve(event)
        finally:
            self.ended.set()
            watch.close()
            fleet.close()
            self._journal.close()
            self._metrics.close()
        return self.outcome

    def _next_event(self) -> Event:
        while True:
            self._keep_lease()
            deadline = self._core.next_deadline()
            now = max(self._now, self._clock())
            if deadline is not None and deadline <= now and self._inbox.empty():
                return Woke()
            patience_s = LEASE_RENEWAL_S if deadline is None else deadline - now
            try:
                return self._inbox.get(timeout=min(max(patience_s, 0.0), LEASE_RENEWAL_S))
            except queue.Empty:
                continue

    def _keep_lease(self) -> None:
        if self._clock() - self._lease_renewed > LEASE_RENEWAL_S:
            self._lease.renew()
            self._lease_renewed = self._clock()

    def _serve(self, event: Event) -> None:
        """One event: decide, make the decision durable, carry it out."""
        self._now = max(self._now, self._clock())
        commands = self._core.step(self._now, event)
        self._lease.check()
        self._journal.write(event_line(self._now, event, self._core.state))
        told = [command for command in commands if not isinstance(command, SILENT)]
        for line in told:
            self._journal.write(command_line(self._now, line, self._core.state))
            if isinstance(line, Resume):
                self._journal.write(state_line(self._now, self._core.state))
        if told:
            self._journal.make_durable()
        for command in commands:
            self._carry_out(command)
            for listener in tuple(self._listeners):
                listener.put(command)

    def _carry_out(self, command: Command) -> None:
        fleet = self._fleet
        match command:
            case StartStore():
                fleet.start_store()
            case StartWorkers():
                fleet.start_workers(command.workers)
            case StopWorker():
                fleet.stop_worker(command.worker)
            case Form():
                fleet.send(command.plan.participants, command)
            case Resume():
                fleet.send((*command.workers, *command.released), command)
            case Abort() | Settle() | Relayout() | Pause() | Protect() | SaveCheckpoint():
                fleet.send(command.workers, command)
            case StartKeeper():
                fleet.start_keeper(command.node)
            case AskKeepers():
                fleet.ask_keepers(command.nodes, command.generation)
            case ForgetSnapshots():
                fleet.forget_snapshots(command.nodes, command.generation)
            case PublishCheckpoint():
                self._publish(command)
            case RecordStep():
                self._metrics.write(dataclasses.asdict(command.record))
                self._post_due(command.record.step)
            case Stopped():
                self.outcome = command
            case Relaid() | RolledBack() | Warned() | Waited() | LayoutAnswered():
                pass  # telling it was all there was to do

    def _post_due(self, step: int) -> None:
        for entry in [entry for entry in self._due if entry[0] <= step]:
            self._due.remove(entry)
            self.post(entry[1])

    def _publish(self, command: PublishCheckpoint) -> None:
        told: dict[str, Any] = {"step": command.step, "generation": command.generation}
        try:
            self._lease.check()
            folder = publish(self._run_folder, files=command.files, **told)
        except OSError as error:
            self.post(PartFailed("", cause=str(error), **told))
        else:
            self.post(Checkpointed(path=str(folder), **told))
