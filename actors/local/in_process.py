"""In-process backend: controller and one worker in the caller's process, without Ray.

For debuggers, profilers and notebooks: there is no other process, and training runs on the caller's
own stack. Shell and worker are the same as in every other backend.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from actors.controller.fleet import answered
from actors.controller.run import RunSpec
from actors.controller.run_opening import expected_end, open_run
from actors.distributed.store import open_store
from actors.runtime.factory import Factory
from actors.runtime.network import listen_address
from actors.storage.storage import open_storage
from actors.worker.worker import Worker
from actors.worker.worker_options import Envelope, WorkerOptions
from elastic.geometry.topology import Place
from elastic.protocol.commands import Order, StartWorkers, Stopped
from elastic.protocol.events import Event, StoreReady, WorkerLost, WorkerRaised

HOST = "127.0.0.1"
NODE = "this-process"


class LoneWorker(Worker):
    """A worker without peers, which keeps the error that ended it and its traceback."""

    error: BaseException | None = None

    def interrupt(self) -> None:
        """Abort the newest generation; no peers wait for its groups."""
        self._interruption.aborted_generation = self.intake.generation

    def report_failure(self, generation: int, error: BaseException) -> None:
        """Report an error as the program's: there is no peer that could have caused it."""
        self.error = error
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        text = "".join(traceback.format_exception(error))
        self._report(WorkerRaised(self.name, generation, "program", message, text))


class InProcessFleet:
    """A fleet of one worker: commands come from the shell's thread, and `serve` executes them on
    the caller's."""

    def __init__(
        self,
        program: Factory,
        options: WorkerOptions,
        post: Callable[[Event], None],
        hear: Callable[[Event], None] = lambda event: None,
        incarnation: int = 1,
    ) -> None:
        """`hear` gets each event of the training thread, on that thread."""
        self._post = post
        self._incarnation = incarnation
        self._host = listen_address(options.network, HOST)
        self._network = options.network

        def report(event: Event) -> None:
            post(event)
            if threading.get_ident() == self._serving:
                hear(event)

        self._serving = 0

        self._begun: Future[str | None] = Future()
        """The name of the requested worker; None if the run ended before the request."""

        def make(name: str) -> LoneWorker:
            return LoneWorker(name, Place(NODE), program, options, report, self._host)

        self._make = make
        self.worker: LoneWorker | None = None

    def serve(self) -> None:
        """Run the worker until the run has stopped, on one CPU thread as any worker."""
        name = self._begun.result()
        if name is None:
            return
        assert self.worker is not None
        self._serving = threading.get_ident()
        num_threads, hook = torch.get_num_threads(), sys.excepthook
        torch.set_num_threads(1)
        try:
            self.worker.serve()
        finally:
            torch.set_num_threads(num_threads)
            torch.set_flush_denormal(False)
            sys.excepthook = hook  # torch's hook, set again for each group, prefixes lines by ranks

    def start_store(self) -> None:
        self._store = open_store(self._host, self._network)
        self._post(StoreReady(self._host, self._store.port))

    def start_workers(self, command: StartWorkers) -> None:
        for name in command.workers:
            if self.worker is None:
                self.worker = self._make(name)
                self._begun.set_result(name)
            else:
                self._post(WorkerLost(name, "an in-process run has one worker", NODE))

    def send(self, workers: Iterable[str], order: Order) -> None:
        for name in workers:
            if self.worker is not None and self.worker.name == name:
                self.worker.take(Envelope(self._incarnation, order))

    def probe(self, worker: str) -> Future[int]:
        """Answer at once, even while the training thread is stopped in a debugger."""
        answer: Future[int] = Future()
        if self.worker is None or self.worker.name != worker:
            answer.set_exception(ProcessLookupError(worker))
        else:
            answer.set_result(self.worker.num_signs_of_life())
        return answer

    def process_state(self, worker: str) -> Future[str]:
        return answered("runs")  # this code runs in the worker's process

    def stop_worker(self, worker: str) -> None:
        """Report the worker as lost: its thread cannot be ended from outside."""
        self._post(WorkerLost(worker, "it was given up", NODE))

    def start_snapshot_server(self, node: str) -> None:
        raise AssertionError("an in-process run takes no snapshots")

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        """Do nothing: there are no snapshot servers."""

    def forget_snapshots(self, nodes: Sequence[str], generation: int, kept_generation: int) -> None:
        """Do nothing: there are no snapshots."""

    def probe_snapshot_server(self, node: str) -> Future[None]:
        raise AssertionError("an in-process run has no snapshot servers")

    def stop_snapshot_server(self, node: str) -> None:
        raise AssertionError("an in-process run has no snapshot servers")

    def interrupt(self) -> None:
        """Make `serve` return even within a step: no controller drives the run any more."""
        if self.worker is not None:
            self.worker.interrupt()
        self.close()

    def close(self) -> None:
        """Make `serve` return after the queued commands."""
        if self.worker is not None:
            self.worker.end()
        elif not self._begun.done():
            self._begun.set_result(None)


@dataclass(frozen=True)
class InProcessOutcome:
    """The outcome of a run, and the error of its own code if that ended it."""

    outcome: Stopped
    error: BaseException | None


def run_in_process(
    run: RunSpec,
    hear: Callable[[Event, Callable[[Event], None]], None] = lambda event, post: None,
    claimed: Callable[[], object] = lambda: None,
) -> InProcessOutcome:
    """Drive a run and run its one worker, until the run has stopped.

    `hear` gets each event of the training, on this thread, and a function that posts events.
    `claimed` is called once no other process can drive the run. Raises `RunTaken` if another
    process drives it, `RunRefused` if it cannot be opened.
    """
    storage = open_storage(run.folder)
    lease, shell = open_run(storage, due=run.draining_workers)
    try:
        claimed()
    except BaseException:
        lease.release()
        raise
    fleet = InProcessFleet(
        run.program, run.options, shell.post, lambda event: hear(event, shell.post), lease.epoch
    )
    driving: Future[Stopped] = Future()

    def drive() -> None:
        try:
            driving.set_result(shell.run(fleet, run.opening))
        except Exception as error:
            fleet.interrupt()
            if stopped := expected_end(error, storage.url, shell.committed_step):
                driving.set_result(stopped)
            else:
                driving.set_exception(error)

    threading.Thread(target=drive, name="controller", daemon=True).start()
    with _environment_restored():
        fleet.serve()
    outcome = driving.result()
    with suppress(OSError):  # a lease that cannot be released expires
        lease.release()
    return InProcessOutcome(outcome, fleet.worker.error if fleet.worker else None)


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Restore the environment. A worker sets variables for its process, such as the name of a local
    network interface. Processes that the caller starts later must not inherit them."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
