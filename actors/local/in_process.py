"""A fleet of one worker in the process of its controller, on a thread that the caller lends.

For debuggers, profilers and notebooks: no Ray and no other process; what is trained stands on the
caller's own stack. The same shell and the same worker as anywhere else.
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
from actors.controller.run_opening import open_run, told_in_one_line
from actors.distributed.store import open_store
from actors.runtime.factory import Factory
from actors.runtime.network import own_address
from actors.storage.storage import open_storage
from actors.worker.worker import Worker
from actors.worker.worker_options import Envelope, WorkerOptions
from elastic.geometry.topology import Place
from elastic.protocol.commands import Order, Stopped
from elastic.protocol.events import Event, StoreReady, WorkerLost, WorkerRaised

HOST = "127.0.0.1"
NODE = "this-process"


class LoneWorker(Worker):
    """A worker that keeps what broke it, with its traceback as it stood."""

    error: BaseException | None = None

    def break_off(self) -> None:
        """Unwind from whatever is done for the newest generation; it has no peers that wait."""
        self._interruption.aborted_generation = self.intake.generation

    def tell(self, generation: int, error: BaseException) -> None:
        """There is no peer to blame: whatever breaks is taken for the program's."""
        self.error = error
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        text = "".join(traceback.format_exception(error))
        self._report(WorkerRaised(self.name, generation, "program", message, text))


class InProcessFleet:
    """Commands come from the shell's thread; `serve` obeys them on the caller's."""

    def __init__(
        self,
        program: Factory,
        options: WorkerOptions,
        post: Callable[[Event], None],
        hear: Callable[[Event], None] = lambda event: None,
        incarnation: int = 1,
    ) -> None:
        """`hear` is called with each event of the thread that trains, on it."""
        self._post = post
        self._incarnation = incarnation
        self._host = own_address(options.network, HOST)
        self._network = options.network

        def report(event: Event) -> None:
            post(event)
            if threading.get_ident() == self._serving:
                hear(event)

        self._serving = 0

        self._begun: Future[str | None] = Future()
        """The worker's name once it is wanted; None if the run has ended before."""

        def make(name: str) -> LoneWorker:
            return LoneWorker(name, Place(NODE), program, options, report, self._host)

        self._make = make
        self.worker: LoneWorker | None = None

    def serve(self) -> None:
        """Be the worker until the run has stopped, on one CPU thread as any worker."""
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
            sys.excepthook = hook  # torch's own, one more a group, puts ranks before each line

    def start_store(self) -> None:
        self._store = open_store(self._host, self._network)
        self._post(StoreReady(self._host, self._store.port))

    def start_workers(self, workers: Sequence[str], quarantined: Sequence[str] = ()) -> None:
        for name in workers:
            if self.worker is None:
                self.worker = self._make(name)
                self._begun.set_result(name)
            else:
                self._post(WorkerLost(name, "one process has one worker", NODE))

    def send(self, workers: Iterable[str], order: Order) -> None:
        for name in workers:
            if self.worker is not None and self.worker.name == name:
                self.worker.take(Envelope(self._incarnation, order))

    def probe(self, worker: str) -> Future[int]:
        """Answered at once, also while the thread that trains stands in a debugger."""
        answer: Future[int] = Future()
        if self.worker is None or self.worker.name != worker:
            answer.set_exception(ProcessLookupError(worker))
        else:
            answer.set_result(self.worker.num_signs_of_life())
        return answer

    def process_state(self, worker: str) -> Future[str]:
        return answered("runs")  # this code runs in it

    def stop_worker(self, worker: str) -> None:
        """It cannot be ended from outside: it is as good as gone."""
        self._post(WorkerLost(worker, "it was given up", NODE))

    def start_snapshot_server(self, node: str) -> None:
        raise AssertionError("a lone worker takes no snapshots")

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        """There are none."""

    def forget_snapshots(self, nodes: Sequence[str], generation: int) -> None:
        """There are none."""

    def probe_snapshot_server(self, node: str) -> Future[None]:
        raise AssertionError("a lone worker has no keepers")

    def stop_snapshot_server(self, node: str) -> None:
        raise AssertionError("a lone worker has no keepers")

    def break_off(self) -> None:
        """Have `serve` return amid a step: nobody drives the run any more."""
        if self.worker is not None:
            self.worker.break_off()
        self.close()

    def close(self) -> None:
        """Have `serve` return."""
        if self.worker is not None:
            self.worker.end()
        elif not self._begun.done():
            self._begun.set_result(None)


@dataclass(frozen=True)
class Ended:
    """How a run ended, and what its own code raised, if that is why."""

    outcome: Stopped
    error: BaseException | None


def run_in_process(
    run: RunSpec,
    hear: Callable[[Event, Callable[[Event], None]], None] = lambda event, post: None,
    claimed: Callable[[], object] = lambda: None,
) -> Ended:
    """Drive a run and be its one worker, until it has stopped.

    `hear` gets each event of the training, on this thread, and where to post others. `claimed` is
    called once no other process can drive the run. Raises `RunTaken` if somebody drives it,
    `RunRefused` if it cannot be opened.
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
            fleet.break_off()
            if known := told_in_one_line(error, storage.url, shell.committed_step):
                driving.set_result(known)
            else:
                driving.set_exception(error)

    threading.Thread(target=drive, name="controller", daemon=True).start()
    with _environment_given_back():
        fleet.serve()
    outcome = driving.result()
    with suppress(OSError):  # a lease that cannot be given back runs out
        lease.release()
    return Ended(outcome, fleet.worker.error if fleet.worker else None)


@contextmanager
def _environment_given_back() -> Iterator[None]:
    """A worker sets variables for its own process. Who trains in theirs may go on to start others,
    which inherit them, such as the name of an interface that leads nowhere else."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
