"""The Ray actors that hold one process each: a worker, the store, a node's agent.

The controller names these classes, and agents are many: so this file imports no torch, which takes
3 s and 200 MB. What needs torch is made by a `Factory` in the process where it runs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any, ClassVar

import psutil
import ray

from actors.controller.fleet import process_state
from actors.notices import SeenNotice, see, watch_this_machine
from actors.ray_backend.cluster.node_labels import head_host, node_type_here, place_here
from actors.ray_backend.cluster.sessions import ignore_signals
from actors.runtime.factory import Factory
from actors.runtime.network import Network, own_address
from actors.runtime.orphan_guard import OrphanGuard, end_process
from actors.storage.errors import UnfitMachine
from actors.storage.storage import open_storage
from actors.worker.sampling import sample_every_s
from actors.worker.worker_options import Envelope, WorkerOptions
from actors.worker.worker_output import KeptOutput
from elastic.protocol.commands import Form
from elastic.protocol.events import Event, Paused, WorkerRaised, WorkerReady
from elastic.protocol.reattachment import Outbox

NUM_PORT_TRIES = 20


class RayWorker:
    """A worker as a Ray actor: orders, probes and its life each have a thread of their own."""

    GROUPS: ClassVar = {"orders": 1, "probes": 1, "life": 1}

    def __init__(
        self,
        name: str,
        program: Factory,
        options: WorkerOptions,
        controller: Any,
        incarnation: int,
        orphan_timeout_s: float,
    ) -> None:
        ignore_signals()
        self._name = name
        self._place = place_here()
        self._node_type = node_type_here()
        self._controller = controller
        self._orphan_guard = OrphanGuard(orphan_timeout_s)
        self._outbox = Outbox(incarnation)
        self._telling = threading.Lock()
        self._look = threading.Event()
        self._num_workers = 1
        self._output = KeptOutput(open_storage(options.run_folder), name)
        of_worker = {
            "name": name,
            "place": self._place,
            "program": program,
            "options": options,
            "report": self._report,
            "store_host": head_host(),
        }
        self._worker = Factory("actors.worker.worker:Worker", of_worker).make()
        threading.Thread(target=self._sample, name="sampler", daemon=True).start()

    @ray.method(concurrency_group="orders")
    def start(self) -> tuple[str, int]:
        """Begin to warm up, if not done; returns at once, with the node's id and this process's."""
        self._worker.start()
        return self._place.node, os.getpid()

    @ray.method(concurrency_group="orders")
    def take(self, envelope: Envelope) -> None:
        self._orphan_guard.hear()
        with self._telling:
            self._outbox.note(envelope.incarnation, envelope.order)
        if isinstance(envelope.order, Form):
            self._num_workers = len(envelope.order.plan.participants)
        self._worker.take(envelope)

    @ray.method(concurrency_group="orders")
    def meet(self, incarnation: int, committed_step: int) -> None:
        """The controller has died and is back; it knows of the steps up to this one."""
        self._orphan_guard.hear()
        self._worker.intake.meet(incarnation)
        with self._telling:
            for event in self._outbox.again(incarnation, committed_step):
                self._controller.report.remote(incarnation, event)

    @ray.method(concurrency_group="probes")
    def newest_generation(self) -> int:
        self._orphan_guard.hear()
        return int(self._worker.intake.generation)

    @ray.method(concurrency_group="probes")
    def signs_of_life(self) -> int:
        self._orphan_guard.hear()
        return int(self._worker.num_signs_of_life())

    @ray.method(concurrency_group="probes")
    def end(self) -> None:
        """What `ray.kill` does, also without Ray's GCS."""
        end_process()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never returns: the end of this call is the end of the process."""
        threading.Event().wait()

    def _report(self, event: Event) -> None:
        if isinstance(event, WorkerReady):
            event = replace(event, node_type=self._node_type)
        with self._telling:
            self._outbox.add(event)
            self._controller.report.remote(self._outbox.incarnation, event)
        if isinstance(event, WorkerReady | Paused | WorkerRaised):
            self._look.set()
            self._output.hurry()

    def _sample(self) -> None:
        """Now and then, and where peaks count: before training, and at its end."""
        process = psutil.Process()
        while True:
            process.cpu_percent()
            self._look.wait(sample_every_s(self._num_workers))
            self._look.clear()
            self._controller.report_sample.remote(self._worker.sample(process))


class RayStore:
    """The store as a Ray actor; it listens only on the address that it tells."""

    GROUPS: ClassVar = {"life": 1}

    def __init__(self, network: Network, orphan_timeout_s: float) -> None:
        self._orphan_guard = OrphanGuard(orphan_timeout_s)
        self._host = own_address(network, head_host())
        self._store = self._open(network)

    def _open(self, network: Network) -> Any:
        """A store that cannot begin is replaced at once: one that finds no port takes its time."""
        store = Factory(
            "actors.distributed.store:open_store", {"host": self._host, "network": network}
        )
        for _ in range(NUM_PORT_TRIES):
            try:
                return store.make()
            except UnfitMachine:
                time.sleep(1.0)
        return store.make()

    def address(self) -> tuple[str, int]:
        return self._host, self._store.port

    def hear(self) -> None:
        self._orphan_guard.hear()

    def end(self) -> None:
        """What `ray.kill` does, also without Ray's GCS."""
        end_process()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        threading.Event().wait()


class RayAgent:
    """One a node: ends processes by signal, which Ray cannot do to a stopped one in time, and
    watches for notices that the node will be gone."""

    def __init__(self, orphan_timeout_s: float) -> None:
        self._orphan_guard = OrphanGuard(orphan_timeout_s)
        self._watcher = watch_this_machine()

    def kill(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it is gone already, which is what was wanted

    def process_state(self, pid: int) -> str:
        """See `actors.system.process_state`."""
        self._orphan_guard.hear()
        return process_state(pid)

    def hear(self) -> SeenNotice | None:
        """Somebody is there, and is told what this machine has been told of its end."""
        self._orphan_guard.hear()
        return see(self._watcher.notice)
