"""Ray actors of one process each: worker, store, node agent.

The controller imports these classes, and every node has an agent. So this module imports no torch,
which takes 3 s and 200 MB. A `Factory` makes what needs torch in the process where it runs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import ray

from actors.controller.fleet import process_state
from actors.notices import TimedNotice, watch_this_machine, with_time_left
from actors.ray_backend.cluster.node_labels import (
    head_host,
    market_here,
    node_type_here,
    place_here,
)
from actors.ray_backend.cluster.sessions import ignore_signals
from actors.ray_backend.detached_actor import DetachedActor
from actors.ray_backend.reports import Reports
from actors.ray_backend.sampling import sample_every_s
from actors.runtime.factory import Factory
from actors.runtime.network import Network, listen_address
from actors.runtime.orphan_guard import OrphanGuard, end_process
from actors.storage.errors import UnsuitableMachine
from actors.storage.storage import open_storage
from actors.worker.worker_options import Envelope, WorkerOptions
from actors.worker.worker_output import KeptOutput, copy_output, output_files
from elastic.geometry.machine_report import Peer
from elastic.protocol.commands import Form
from elastic.protocol.events import Event, Paused, WorkerRaised, WorkerReady

NUM_PORT_TRIES = 20


class RayWorker:
    """A worker as a Ray actor; orders, probes and the lifetime call have separate threads."""

    GROUPS: ClassVar = {"orders": 1, "probes": 1, "life": 1}

    def __init__(
        self,
        name: str,
        program: Factory,
        options: WorkerOptions,
        controller: Any,
        incarnation: int,
        orphan_timeout_s: float,
        peers: Sequence[Peer] = (),
    ) -> None:
        ignore_signals()
        self._name = name
        self._place = place_here()
        self._node_type, self._market = node_type_here(), market_here()
        self._controller = controller
        self._orphan_guard = OrphanGuard(orphan_timeout_s)
        self._reports = Reports(controller, incarnation)
        self._sample_now = threading.Event()
        self._num_workers = 1
        self._output = KeptOutput(open_storage(options.run_folder), name)
        arguments = {
            "name": name,
            "place": self._place,
            "program": program,
            "options": options,
            "report": self._report,
            "store_host": head_host(),
            "peers": peers,
        }
        self._worker = Factory("actors.worker.worker:Worker", arguments).make()
        threading.Thread(target=self._sample, name="sampler", daemon=True).start()

    @ray.method(concurrency_group="orders")
    def start(self) -> tuple[str, int, Mapping[str, Path]]:
        """Begin to warm up, unless begun; return at once with the node's id, the process id and the
        files of the output."""
        self._worker.start()
        return self._place.node, os.getpid(), output_files()

    @ray.method(concurrency_group="orders")
    def take(self, envelope: Envelope) -> None:
        self._orphan_guard.hear()
        self._reports.note(envelope.incarnation, envelope.order)
        if isinstance(envelope.order, Form):
            self._num_workers = len(envelope.order.plan.participants)
        self._worker.take(envelope)

    @ray.method(concurrency_group="orders")
    def meet(self, incarnation: int, committed_step: int) -> None:
        """Greet a restarted controller, which knows the steps up to `committed_step`."""
        self._orphan_guard.hear()
        self._worker.intake.meet(incarnation)
        self._reports.repeat(incarnation, committed_step)

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
        """End the process as `ray.kill` does, but without Ray's GCS."""
        end_process()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never return: the end of this call reports the end of the process."""
        threading.Event().wait()

    def _report(self, event: Event) -> None:
        if isinstance(event, WorkerReady):
            event = replace(event, node_type=self._node_type, market=self._market)
        self._reports.add(event)
        if isinstance(event, WorkerReady | Paused | WorkerRaised):
            self._sample_now.set()
            self._output.hurry()

    def _sample(self) -> None:
        """Report samples at intervals, and when peaks count: before training and at its end."""
        process = psutil.Process()
        while True:
            process.cpu_percent()
            self._sample_now.wait(sample_every_s(self._num_workers))
            self._sample_now.clear()
            self._controller.report_sample.remote(self._worker.sample(process))


class RayStore(DetachedActor):
    """The store as a Ray actor; it listens only on the address that it reports."""

    def __init__(self, network: Network, orphan_timeout_s: float) -> None:
        super().__init__(orphan_timeout_s)
        self._host = listen_address(network, head_host())
        self._store = self._open(network)

    def _open(self, network: Network) -> Any:
        """Open the store. If no port is free, retry here: the controller would replace a store that
        fails to start at once."""
        store = Factory(
            "actors.distributed.store:open_store", {"host": self._host, "network": network}
        )
        for _ in range(NUM_PORT_TRIES):
            try:
                return store.make()
            except UnsuitableMachine:
                time.sleep(1.0)
        return store.make()

    def address(self) -> tuple[str, int]:
        return self._host, self._store.port


class RayAgent:
    """The agent of a node. It ends processes by signal, since Ray cannot end a stopped one in time,
    copies the last output of ended workers, and watches for notices that the node will be gone."""

    GROUPS: ClassVar = {"output": 1}

    def __init__(self, orphan_timeout_s: float) -> None:
        self._orphan_guard = OrphanGuard(orphan_timeout_s)
        self._watcher = watch_this_machine()

    def kill(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it has ended already

    def process_state(self, pid: int) -> str:
        """See `actors.controller.fleet.process_state`."""
        self._orphan_guard.hear()
        return process_state(pid)

    @ray.method(concurrency_group="output")
    def copy_output(self, run_folder: str, worker: str, files: Mapping[str, Path]) -> None:
        """See `actors.worker.worker_output.copy_output`; calls of other methods do not wait."""
        copy_output(run_folder, worker, files)

    def hear(self) -> TimedNotice | None:
        """Note the controller's greeting, and return this machine's termination notice, if any."""
        self._orphan_guard.hear()
        return with_time_left(self._watcher.notice)
