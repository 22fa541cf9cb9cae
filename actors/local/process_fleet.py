"""Process backend: workers as plain child processes on this machine, without Ray.

For tests, for bare GPU machines, and to study the protocol without anything around it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from actors.controller.fleet import answered, missing, process_state
from actors.distributed.store import host_store
from actors.runtime.factory import Factory
from actors.runtime.network import listen_address
from actors.snapshots.server import host_snapshot_server
from actors.worker.worker import Worker
from actors.worker.worker_options import Envelope, WorkerOptions
from elastic.geometry.machine_report import Peer
from elastic.geometry.topology import Place
from elastic.protocol.commands import Order, StartWorkers
from elastic.protocol.events import Event, StoreLost, StoreReady, WorkerLost
from elastic.protocol.snapshot_events import SnapshotServerLost

START = multiprocessing.get_context("forkserver")
"""Children are forked from a server that has imported torch and the program, but has formed no
groups: they start in a fraction of a second."""

PRELOADED = (
    "actors.worker.worker",
    "torch.distributed.pipelining",
    "numpy.ma",
    "encodings.idna",
    "actors.local.preloaded",  # last, as it exempts all that is imported from garbage collections
)
HOST = "127.0.0.1"
NODE = "this-machine"


@dataclass
class _Child:
    process: BaseProcess
    pipe: Connection
    sending: threading.Lock = field(default_factory=threading.Lock)
    probes: list[Future[Any]] = field(default_factory=list)
    node: str = ""

    def send(self, message: Any) -> None:
        with self.sending, suppress(OSError):  # the end of the pipe reports its death
            self.pipe.send(message)


class ProcessFleet:
    """A fleet of children with a pipe each; one thread reads all pipes and notices deaths."""

    def __init__(
        self,
        program: Factory,
        options: WorkerOptions,
        post: Callable[[Event], None],
        incarnation: int = 1,
        node_of: Callable[[str], str] = lambda worker: NODE,
    ) -> None:
        """`node_of` assigns workers to simulated nodes. A worker whose node is quarantined goes to
        another node that has workers, or waits."""
        START.set_forkserver_preload([program.target.partition(":")[0], *PRELOADED])
        self._host = listen_address(options.network, HOST)
        self._program = program
        self._options = options
        self._post = post
        self._incarnation = incarnation
        self._workers: dict[str, _Child] = {}
        self._waiting: set[str] = set()
        """The workers that wait for a node that is not quarantined."""
        self._node_of = node_of
        self._store: _Child | None = None
        self._snapshot_servers: dict[str, _Child] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._wake_reader, self._woken = START.Pipe()
        self._reader = threading.Thread(target=self._read, name="fleet", daemon=True)
        self._reader.start()

    def start_store(self) -> None:
        self._store = self._spawn(host_store, self._host, self._options.network)

    def start_workers(self, command: StartWorkers) -> None:
        for worker in command.workers:
            node = self._place(worker, command.quarantined)
            if node is None:
                self._waiting.add(worker)
                continue
            arguments = (worker, node, self._program, self._options, command.peers)
            child = self._spawn(serve_worker, *arguments)
            child.node = node
            with self._lock:
                self._workers[worker] = child
        self._wake_reader.send(None)

    def _place(self, worker: str, quarantined: Sequence[str]) -> str | None:
        node = self._node_of(worker)
        if node not in quarantined:
            return node
        with self._lock:
            others = {child.node for child in self._workers.values()} - set(quarantined)
        return min(others, default=None)

    def start_snapshot_server(self, node: str) -> None:
        options = self._options
        settings = (self._host, options.secret, options.network, options.max_snapshot_bytes)
        child = self._spawn(host_snapshot_server, node, "", *settings)
        with self._lock:
            self._snapshot_servers[node] = child
        self._wake_reader.send(None)

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        self._inform_snapshot_servers(nodes, (True, generation))

    def forget_snapshots(self, nodes: Sequence[str], generation: int, kept_generation: int) -> None:
        self._inform_snapshot_servers(nodes, (False, generation, kept_generation))

    def stop_worker(self, worker: str) -> None:
        if worker in self._waiting:
            self._waiting.discard(worker)
            self._post(WorkerLost(worker, "it found no node"))
        else:
            self._kill(self._workers, worker)

    def send(self, workers: Iterable[str], order: Order) -> None:
        for worker in workers:
            with self._lock:
                child = self._workers.get(worker)
            if child is not None:
                child.send(Envelope(self._incarnation, order))

    def probe(self, worker: str) -> Future[int]:
        return self._probe(self._workers, worker)

    def process_state(self, worker: str) -> Future[str]:
        with self._lock:
            child = self._workers.get(worker)
        return answered("gone" if child is None else process_state(child.process.pid or 0))

    def probe_snapshot_server(self, node: str) -> Future[None]:
        return self._probe(self._snapshot_servers, node)

    def stop_snapshot_server(self, node: str) -> None:
        self._kill(self._snapshot_servers, node)

    def pids(self) -> dict[str, int]:
        """The living workers' process ids."""
        with self._lock:
            return {name: child.process.pid or 0 for name, child in self._workers.items()}

    def snapshot_server_pids(self) -> dict[str, int]:
        """The process ids of the living snapshot servers, by node."""
        with self._lock:
            return {node: child.process.pid or 0 for node, child in self._snapshot_servers.items()}

    def close(self) -> None:
        self._closed = True
        with self._lock:
            children = [*self._workers.values(), *self._snapshot_servers.values()]
            children += [self._store] if self._store else []
        for child in children:
            child.process.kill()
        for child in children:
            child.process.join()
            child.pipe.close()
        self._wake_reader.send(None)
        self._reader.join()
        self._wake_reader.close()
        self._woken.close()

    def _inform_snapshot_servers(self, nodes: Sequence[str], message: tuple[int, ...]) -> None:
        for node in nodes:
            with self._lock:
                child = self._snapshot_servers.get(node)
            if child is not None:
                child.send(message)

    def _probe(self, children: dict[str, _Child], name: str) -> Future[Any]:
        with self._lock:
            child = children.get(name)
        if child is None:
            return missing(name)
        answer: Future[Any] = Future()
        child.probes.append(answer)
        child.send("probe")
        return answer

    def _kill(self, children: dict[str, _Child], name: str) -> None:
        with self._lock:
            child = children.get(name)
        if child is not None:
            child.process.kill()

    def _spawn(self, target: Callable[..., None], *arguments: Any) -> _Child:
        ours, theirs = START.Pipe()
        child_arguments = (dict(os.environ), target, theirs, *arguments)
        process = START.Process(target=start_child, args=child_arguments, daemon=True)
        process.start()
        theirs.close()
        self._wake_reader.send(None)
        return _Child(process, ours)

    def _read(self) -> None:
        while not self._closed:
            with self._lock:
                children, snapshot_servers = dict(self._workers), dict(self._snapshot_servers)
            sources: dict[Any, str] = {child.pipe: name for name, child in children.items()}
            nodes: dict[Any, str] = {child.pipe: node for node, child in snapshot_servers.items()}
            store = self._store
            extra = [store.pipe] if store else []
            for ready in wait([*sources, *nodes, *extra, self._woken]):
                if ready is self._woken:
                    self._woken.recv()
                elif store and ready is store.pipe:
                    self._read_store(store)
                elif ready in nodes:
                    self._read_snapshot_server(nodes[ready], snapshot_servers[nodes[ready]])
                elif ready in sources:
                    self._read_worker(sources[ready], children[sources[ready]])

    def _read_store(self, store: _Child) -> None:
        try:
            self._post(StoreReady(self._host, store.pipe.recv()))
        except (EOFError, OSError):
            self._store = None
            if not self._closed:
                self._post(StoreLost("its process died"))

    def _read_snapshot_server(self, node: str, child: _Child) -> None:
        try:
            message = child.pipe.recv()
        except (EOFError, OSError):
            with self._lock:
                self._snapshot_servers.pop(node, None)
            if not self._closed:
                child.process.join()
                self._post(SnapshotServerLost(node, f"exit code {child.process.exitcode}"))
                child.pipe.close()
            return
        if message is None:
            child.probes.pop(0).set_result(None)
        else:
            self._post(message)

    def _read_worker(self, worker: str, child: _Child) -> None:
        """Read a message, or the end of the pipe, which means the end of the process."""
        try:
            message = child.pipe.recv()
        except (EOFError, OSError):
            with self._lock:
                self._workers.pop(worker, None)
            if not self._closed:
                child.process.join()
                code = child.process.exitcode
                is_crash = code not in (-signal.SIGKILL, -signal.SIGTERM)
                self._post(WorkerLost(worker, f"exit code {code}", child.node, is_crash))
                child.pipe.close()
            return
        if isinstance(message, int):
            child.probes.pop(0).set_result(message)
        else:
            self._post(message)


def start_child(environment: dict[str, str], target: Callable[..., None], *arguments: Any) -> None:
    """Run `target` in the parent's present environment.

    The fork server keeps the environment of its start, which may lack variables set since. Without
    its credentials, for example, an S3 client sends unsigned requests.
    """
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


def serve_worker(
    pipe: Connection,
    name: str,
    node: str,
    program: Factory,
    options: WorkerOptions,
    peers: Sequence[Peer],
) -> None:
    """The child's main function: execute commands until the parent is gone."""
    torch.set_num_threads(1)  # a worker is one CPU slot, as in Ray
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides how a run ends
    sending = threading.Lock()

    def report(message: Event | int) -> None:
        with sending:
            pipe.send(message)

    worker = Worker(name, Place(node), program, options, report, HOST, peers)
    worker.start()
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            os._exit(0)
        if message == "probe":
            report(worker.num_signs_of_life())
        else:
            worker.take(message)
