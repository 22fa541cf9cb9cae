"""The controller as a named Ray actor: the shell in a thread, and doors for workers and driver."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import ray

from actors.asking import LayoutReply, ask_for_layout
from actors.errors import RunRefused, UnfitMachine
from actors.figures import Figure, Gauges
from actors.interface import own_address
from actors.lease import claim
from actors.lines import LineLog, open_lines
from actors.listening import Network, listen
from actors.program import Factory
from actors.ray_fleet import RayFleet
from actors.ray_names import NAMESPACE
from actors.ray_place import head_host
from actors.ray_private import ON_HEAD
from actors.ray_worker import Orphanage, end_process
from actors.shell import JOURNAL, Shell
from actors.sources import digest_of_sources
from actors.storage import Storage, open_storage
from actors.trainer import WorkerOptions
from elastic.commands import Stopped
from elastic.events import Event, RunOpened, StopRequested
from elastic.planning import Wish
from elastic.wire import UnreadableJournal

CONTROLLER_GROUPS = {"reports": 1, "samples": 1, "driver": 2, "layouts": 1}
OBSERVER_PATIENCE_S = 30.0
ATTEND_EVERY_S = 1.0
POLL_EVERY_S = 5.0
END_PATIENCE_S = 5.0
STORAGE_PATIENCE_S = 45.0
"""Less than the driver's for a controller that does not come back."""
NICENESS = 10
OTHER_SOURCES = (
    "the controller on {} runs other sources than this command: install one working tree "
    "everywhere, or send it along with `ray job submit --working-dir .`"
)


def _refuse_network(network: Network) -> None:
    """The store will listen on this machine. Raises `RunRefused` if it cannot."""
    try:
        listen(own_address(network, head_host()), network).close()
    except UnfitMachine as error:
        raise RunRefused(f"{socket.gethostname()}: {error}") from None


class Observer(Protocol):
    """Follows a run's files beside the training, in a process of its own."""

    def poll(self) -> None:
        """Look for what is new; called every few seconds."""

    def figures(self) -> Iterable[Figure]:
        """What there is to be measured of the run now."""

    def finish(self, patience_s: float) -> str | None:
        """Deliver the rest; return one line about what could not be delivered, or None."""


@dataclass(frozen=True)
class Run:
    """All that a controller needs to drive a run."""

    name: str
    folder: str
    opening: RunOpened
    program: Factory
    options: WorkerOptions
    leavers: tuple[tuple[int, Event], ...] = ()
    """What shall be posted once a step has committed: planned removals."""
    observers: tuple[Factory, ...] = ()
    resources: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 1})
    """What each worker asks the cluster for, as options of its actor."""
    orphan_timeout_s: float = 30.0
    detached: bool = False
    sources: str = ""
    """The digest of the driver's, which the controller's must equal."""


@dataclass(frozen=True)
class Progress:
    """What the driver is told when it asks."""

    outcome: Stopped | None = None
    undelivered: tuple[str, ...] = ()
    """One line an observer about what it could not deliver."""
    is_stopping: bool = False
    """Somebody has asked for the end, which comes when the last checkpoint is saved."""
    is_detached: bool = False
    driver_silence_s: float = 0.0
    """Falls whenever the driver asks; who is not detached and hears nobody will stop."""
    trouble: str = ""
    """Why storage does not take the run's lines at present."""


class RayObserver:
    """An observer's process; that it is alive to somebody is heard beside its work."""

    GROUPS: ClassVar = {"life": 1}

    def __init__(self, factory: Factory, run_name: str, orphan_timeout_s: float) -> None:
        os.nice(NICENESS)  # training comes first
        self._orphanage = Orphanage(orphan_timeout_s)
        self._gauges = Gauges(run_name)
        self._observer: Observer = factory.make()

    @ray.method(concurrency_group="life")
    def hear(self) -> None:
        self._orphanage.hear()

    def poll(self) -> None:
        self._observer.poll()
        self._gauges.show(self._observer.figures())

    def finish(self, patience_s: float) -> str | None:
        return self._observer.finish(patience_s)


class RayController:
    """Drives one run from begin to end; it lives as long as somebody asks or it is detached."""

    def __init__(self, run: Run) -> None:
        if run.sources not in ("", digest_of_sources()):
            raise RunRefused(OTHER_SOURCES.format(ray.util.get_node_ip_address()))
        _refuse_network(run.options.network)
        self._run = run
        self._driver_silence_s = 0.0
        self._is_stopping = False
        self._me = ray.get_runtime_context()
        self._orphanage = Orphanage(run.orphan_timeout_s, self._end)
        self._progress = Progress()
        self._ended = threading.Event()
        self._take_run(open_storage(run.folder))
        self._fleet = RayFleet(
            run.name,
            run.program,
            run.options,
            run.resources,
            run.orphan_timeout_s,
            self._shell.post,
            self._lease.epoch,
        )
        self._observers = [self._observe(i, f) for i, f in enumerate(run.observers)]
        threading.Thread(target=self._drive, name="controller", daemon=True).start()
        threading.Thread(target=self._attend, name="attendance", daemon=True).start()

    def _take_run(self, storage: Storage) -> None:
        """Whoever comes back has a run to go on with, and insists where storage does not answer."""
        deadline = time.monotonic()
        with warnings.catch_warnings(action="ignore"):  # Ray asks itself in a way that is to go
            has_been_here = self._me.was_current_actor_reconstructed
        if has_been_here:
            deadline += STORAGE_PATIENCE_S
        while True:
            try:
                self._lease = claim(storage, self._me.gcs_address, self._me.get_actor_id())
                self._samples = open_lines(LineLog(storage, "system.jsonl"))
                self._shell = Shell(storage, self._lease, self._run.leavers)
                return
            except UnreadableJournal as error:
                self._lease.release()
                raise RunRefused(
                    f"{storage.at(JOURNAL).url}: {error}; choose another --run-name, or resume it "
                    "with the version that wrote it"
                ) from None
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RunRefused(f"{storage.url}: it cannot be opened ({error})") from None
                time.sleep(1.0)

    @ray.method(concurrency_group="reports")
    def report(self, incarnation: int, event: Event) -> None:
        """A worker's events, in its order. Those that were meant for a controller that has died
        come again."""
        if incarnation == self._lease.epoch:
            self._shell.post(event)

    @ray.method(concurrency_group="samples")
    def report_sample(self, line: dict[str, Any]) -> None:
        self._samples.write(line)

    @ray.method(concurrency_group="driver")
    def progress(self, patience_s: float) -> Progress:
        """Waits so long for the run's end; who does so is the driver, and shows that it lives."""
        if patience_s:
            self._driver_silence_s = 0.0
        self._ended.wait(patience_s)
        return replace(
            self._progress,
            is_stopping=self._is_stopping,
            is_detached=self._run.detached,
            driver_silence_s=self._driver_silence_s,
            trouble=self._shell.trouble,
        )

    @ray.method(concurrency_group="driver")
    def request_stop(self, cause: str) -> None:
        self._is_stopping = True
        self._shell.post(StopRequested(cause))

    @ray.method(concurrency_group="layouts")
    def ask_for_layout(self, wish: Wish, patience_s: float) -> LayoutReply:
        """Another process asks; one such request at a time."""
        return ask_for_layout(self._shell, wish, patience_s)

    def _drive(self) -> None:
        try:
            outcome = self._shell.run(self._fleet, self._run.opening, self._fleet)
            self._samples.close()
            with suppress(OSError):  # a lease that cannot be given back runs out
                self._lease.release()
        except Exception as error:
            reason = f"the controller broke: {type(error).__name__}: {error}"
            outcome = Stopped("failed", 0, reason, traceback.format_exc())
        undelivered: tuple[str, ...] = ()
        try:
            undelivered = tuple(told for told in self._finish_observers() if told)
        finally:
            self._progress = Progress(outcome, undelivered)
            self._ended.set()

    def _attend(self) -> None:
        """Poll the observers; ask for a stop when the driver has gone silent."""
        asked, polled = False, 0.0
        while True:
            time.sleep(ATTEND_EVERY_S)
            if time.monotonic() - polled >= POLL_EVERY_S:
                polled = time.monotonic()
                for observer in self._observers:
                    observer.hear.remote()
                    observer.poll.remote()
            self._driver_silence_s += ATTEND_EVERY_S
            running = self._progress.outcome is None
            is_alone = self._driver_silence_s >= self._run.orphan_timeout_s / 3
            if not is_alone or (running and self._run.detached):
                self._orphanage.hear()
            elif running and not asked:
                asked = True
                self.request_stop("the driver is gone")
            elif running:
                self._orphanage.hear()  # the last checkpoint is being written

    def _end(self) -> None:
        """For good: who ends himself by a signal is restarted."""
        with suppress(ray.exceptions.RayError, ValueError):  # then by the signal
            ray.kill(self._me.current_actor)
            time.sleep(END_PATIENCE_S)
        end_process()

    def _observe(self, number: int, factory: Factory) -> Any:
        is_heir = self._lease.since < self._lease.epoch
        there = self._fleet.observer(number) if is_heir else None
        if there is not None:
            return there
        return (
            ray.remote(concurrency_groups=RayObserver.GROUPS)(RayObserver)
            .options(
                name=f"{self._run.name}:observer-{number}-{self._lease.epoch}",
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                enable_task_events=False,
                resources=ON_HEAD,
            )
            .remote(factory, self._run.name, self._run.orphan_timeout_s)
        )

    def _finish_observers(self) -> list[str | None]:
        told: list[str | None] = []
        for observer in self._observers:
            try:
                answer = observer.finish.remote(OBSERVER_PATIENCE_S)
                told.append(ray.get(answer, timeout=2 * OBSERVER_PATIENCE_S))
            except ray.exceptions.RayError as error:
                last_line = str(error).strip().split("\n")[-1]
                told.append(f"an observer broke: {last_line}")
            ray.kill(observer)
        return told
