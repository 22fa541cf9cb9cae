"""The controller as a named Ray actor: the shell on a thread, methods for workers and driver."""

from __future__ import annotations

import socket
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import ray

from actors.controller.layout_requests import LayoutReply, send_layout_request
from actors.controller.run import RunSpec
from actors.controller.run_opening import open_run, outcome_of
from actors.controller.start_guard import STORAGE_PATIENCE_S
from actors.ray_backend.actor_names import Greeter, controller_name, end_actors
from actors.ray_backend.cluster.head_watch import HeadWatch
from actors.ray_backend.cluster.node_labels import head_host
from actors.ray_backend.fleet import RayFleet
from actors.ray_backend.observers import make_observers
from actors.runtime.code_digest import digest_of_sources
from actors.runtime.network import Network, listen, listen_address
from actors.runtime.orphan_guard import OrphanGuard, end_process
from actors.storage.errors import RunRefused, UnsuitableMachine
from actors.storage.file_names import SYSTEM
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import open_lines
from actors.storage.storage import open_storage
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.commands import Stopped
from elastic.protocol.events import Event, StopRequested

CONTROLLER_GROUPS = {"reports": 1, "samples": 1, "driver": 2, "layouts": 1}

ATTEND_EVERY_S = 1.0

POLL_EVERY_S = 5.0

OBSERVERS_START_S = 20.0
"""The observers start with the first step, and at the latest after this time: before, their imports
would delay the workers'."""

END_PATIENCE_S = 5.0

SAMPLES_PATIENCE_S = 5.0

HEAD_GONE = "Ray's head process (the GCS at {}) is gone"

OTHER_SOURCES = (
    "the controller on {} runs other sources than this command: install one working tree "
    "everywhere, or send it along with `ray job submit --working-dir .`"
)


def _refuse_network(network: Network) -> None:
    """Raise `RunRefused` if the store cannot listen on this machine."""
    try:
        listen(listen_address(network, head_host()), network).close()
    except UnsuitableMachine as error:
        raise RunRefused(f"{socket.gethostname()}: {error}") from None


@dataclass(frozen=True)
class DriverReport:
    """The status that the driver gets from the controller."""

    outcome: Stopped | None = None
    undelivered: tuple[str, ...] = ()
    """A line for each observer about what it could not deliver."""
    is_stopping: bool = False
    """Whether a stop was requested; the run ends when the last checkpoint is saved."""
    is_detached: bool = False
    driver_silence_s: float = 0.0
    """The time since the driver's last query; if it is too long, a run stops unless detached."""
    trouble: str = ""
    """What currently waits for storage, and why; empty if nothing does."""
    is_head_gone: bool = False
    """Whether Ray's GCS is gone; the run ends for that reason."""


class RayController:
    """Drives one run from begin to end. If it is not detached, it stops the run when the driver
    falls silent."""

    def __init__(self, run: RunSpec) -> None:
        self._run = run
        self._driver_silence_s = 0.0
        self._is_stopping = False
        self._me = ray.get_runtime_context()
        self._progress = DriverReport()
        self._ended = threading.Event()
        with warnings.catch_warnings(action="ignore"):  # Ray uses a deprecated API of its own here
            is_restarted = self._me.was_current_actor_reconstructed
        self._greeter = Greeter(run.name) if is_restarted else None
        try:
            self._open_run(is_restarted)
        except Exception:
            if is_restarted:  # Ray does not restart it once more, so no process drives the run
                with suppress(ray.exceptions.RayError):  # the cluster is gone, and its actors, too
                    end_actors(run.name, but=controller_name(run.name))
            raise
        self._fleet = RayFleet(
            run.name,
            run.program,
            run.options,
            run.resources,
            run.orphan_timeout_s,
            self._shell.post,
            self._lease.epoch,
        )
        self._head = HeadWatch(self._me.gcs_address, run.head_patience_s, self._note_head_gone)
        self._orphan_guard = OrphanGuard(run.orphan_timeout_s, self._end)
        epoch, is_heir = self._lease.epoch, self._lease.since < self._lease.epoch
        self._observers = make_observers(
            run.name, run.observers, run.orphan_timeout_s, epoch, is_heir
        )
        self._observe_from = time.monotonic() + (0.0 if is_restarted else OBSERVERS_START_S)
        threading.Thread(target=self._drive, name="controller", daemon=True).start()
        threading.Thread(target=self._attend, name="attendance", daemon=True).start()

    def _open_run(self, is_restarted: bool) -> None:
        """Open the run. If storage does not answer, a restarted controller retries, since its run
        still trains; without limit if no driver waits for the run."""
        run = self._run
        if run.sources not in ("", digest_of_sources()):
            raise RunRefused(OTHER_SOURCES.format(ray.util.get_node_ip_address()))
        _refuse_network(run.options.network)
        storage = open_storage(run.folder)
        heir_patience_s = inf if run.detached else STORAGE_PATIENCE_S
        deadline = time.monotonic() + (heir_patience_s if is_restarted else 0.0)
        while True:
            try:
                self._lease, self._shell = open_run(
                    storage,
                    self._me.gcs_address,
                    self._me.get_actor_id(),
                    run.draining_workers,
                    heir_patience_s,
                )
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    cause = f"the run cannot be opened, storage does not answer ({error})"
                    raise RunRefused(f"{storage.url}: {cause}") from None
                time.sleep(1.0)
        log, check = LineLog(storage, SYSTEM), self._lease.check_now
        self._samples = open_lines(log, self._lease.epoch, check, opens_later=True)

    @ray.method(concurrency_group="reports")
    def report(self, incarnation: int, *events: Event) -> None:
        """Take a worker's events, in its order. It sends events for a dead controller again."""
        if incarnation == self._lease.epoch:
            for event in events:
                self._shell.post(event)

    @ray.method(concurrency_group="samples")
    def report_sample(self, line: dict[str, Any]) -> None:
        self._samples.write(line)

    @ray.method(concurrency_group="driver")
    def progress(self, patience_s: float) -> DriverReport:
        """Wait for the run's end, at most `patience_s`, and return the status. Only the driver
        waits, and shows by this that it is alive."""
        if patience_s:
            self._driver_silence_s = 0.0
        self._ended.wait(patience_s)
        return replace(
            self._progress,
            is_stopping=self._is_stopping,
            is_detached=self._run.detached,
            driver_silence_s=self._driver_silence_s,
            trouble=self._shell.trouble,
            is_head_gone=self._head.is_gone,
        )

    @ray.method(concurrency_group="driver")
    def request_stop(self, cause: str) -> None:
        self._is_stopping = True
        self._shell.post(StopRequested(cause))

    @ray.method(concurrency_group="layouts")
    def send_layout_request(self, target_layout: TargetLayout, patience_s: float) -> LayoutReply:
        """Request another layout, for any process; the controller handles one request at a time."""
        return send_layout_request(self._shell, target_layout, patience_s)

    def _note_head_gone(self) -> None:
        self._fleet.is_head_gone = True
        self.request_stop(HEAD_GONE.format(self._me.gcs_address))

    def _drive(self) -> None:
        try:
            outcome = self._shell.run(self._fleet, self._run.opening, self._fleet)
            self._samples.close(SAMPLES_PATIENCE_S)
            with suppress(OSError):  # a lease that cannot be released expires
                self._lease.release()
        except Exception as error:
            outcome = outcome_of(error, self._run.folder, self._shell.committed_step)
        undelivered: tuple[str, ...] = ()
        try:
            texts = [observer.finish(self._head.is_gone) for observer in self._observers]
            undelivered = tuple(text for text in texts if text)
        finally:
            self._progress = DriverReport(outcome, undelivered)
            self._ended.set()

    def _attend(self) -> None:
        """Poll the observers; request a stop when the driver falls silent; end the process once the
        run has ended and the driver is gone.

        If this thread dies, the orphan guard gets no signs of life and ends the process.
        """
        is_stop_requested, polled_at = False, 0.0
        while True:
            time.sleep(ATTEND_EVERY_S)
            if self._greeter and self._shell.opened.is_set():
                self._greeter.close()
            if self._is_observed() and time.monotonic() - polled_at >= POLL_EVERY_S:
                polled_at = time.monotonic()
                for observer in self._observers:
                    observer.poll()
            self._driver_silence_s += ATTEND_EVERY_S
            is_alone = self._driver_silence_s >= self._run.driver_timeout_s
            if self._progress.outcome is None:
                if is_alone and not self._run.detached and not is_stop_requested:
                    is_stop_requested = True
                    self.request_stop("the driver is gone")
            elif is_alone:
                self._end()
            self._orphan_guard.hear()

    def _is_observed(self) -> bool:
        is_time = self._shell.has_trained or time.monotonic() >= self._observe_from
        return is_time and not self._head.is_gone

    def _end(self) -> None:
        """End this actor for good, and all others of the run, whose workers may still be pending.
        Ray restarts an actor that ends by a signal."""
        if self._head.is_gone:  # Ray cannot restart it, and `ray.kill` would wait
            end_process()
        with suppress(ray.exceptions.RayError, ValueError):  # then a signal ends it
            end_actors(self._run.name, but=controller_name(self._run.name))
            ray.kill(self._me.current_actor)
            time.sleep(END_PATIENCE_S)
        end_process()
