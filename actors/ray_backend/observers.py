"""Observers of a run: one supervised Ray actor each, replaced when it dies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Protocol

import ray

from actors.ray_backend.actor_names import NAMESPACE, find_actors
from actors.ray_backend.cluster.ray_private import ON_HEAD
from actors.ray_backend.metrics import Gauges, Metric
from actors.runtime.factory import Factory
from actors.runtime.orphan_guard import OrphanGuard, end_process
from elastic.protocol.policy import backoff_s

PATIENCE_S = 30.0
HEADLESS_PATIENCE_S = 5.0
"""Without Ray's GCS, an observer that had not fully started never answers."""
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
START_PATIENCE_S = 60.0
SILENCE_S = 60.0
"""An observer that answers nothing for this long is replaced. Its work runs on another thread."""
NUM_LAST_TRIES = 4
NEVER_STARTED = (
    "the run's observer had not started yet: its deliveries lack the run until it is resumed"
)
NICENESS = 10


class ObserverNotStarted(Exception):
    """Ray could not start the observer's process."""


class Observer(Protocol):
    """Follows a run's files in its own process while the run trains."""

    def poll(self) -> None:
        """Read what is new; called every few seconds."""

    def metrics(self) -> Iterable[Metric]:
        """The current metrics of the run."""

    def finish(self, patience_s: float) -> str | None:
        """Deliver the rest; return one line about what could not be delivered, or None."""


class RayObserver:
    """An observer's process; a second thread answers greetings while the observer works."""

    GROUPS: ClassVar = {"life": 1}

    def __init__(self, factory: Factory, run_name: str, orphan_timeout_s: float) -> None:
        os.nice(NICENESS)  # training comes first
        self._orphan_guard = OrphanGuard(orphan_timeout_s)
        self._gauges = Gauges(run_name)
        self._observer: Observer = factory.make()

    @ray.method(concurrency_group="life")
    def hear(self) -> None:
        self._orphan_guard.hear()

    @ray.method(concurrency_group="life")
    def end(self) -> None:
        end_process()

    def poll(self) -> None:
        self._observer.poll()
        self._gauges.show(self._observer.metrics())

    def finish(self, patience_s: float) -> str | None:
        return self._observer.finish(patience_s)


class SupervisedObserver:
    """One observer, started by the first poll, replaced when its process dies or no longer answers.

    A new process delivers what the previous one did not: the run's files are the spool.
    """

    def __init__(self, start: Callable[[], Any], survivor: Any = None) -> None:
        """`survivor` is the actor of an earlier controller, or None."""
        self._start = start
        self._actor = survivor
        self._num_losses = 0
        self._lock = threading.Lock()
        self._is_lost, self._is_finishing = survivor is None, False
        self._start_at = 0.0
        self._heard_at = time.monotonic()

    def poll(self) -> None:
        """Let the observer read what is new; start or replace it if it has to be."""
        with self._lock:
            if self._is_finishing:
                if self._actor is not None:
                    self._actor.hear.remote()
                return
            is_due = self._is_lost and time.monotonic() >= self._start_at
        if is_due:
            self._start_actor()
        with self._lock:
            if self._is_lost or self._is_finishing:
                return
            if time.monotonic() - self._heard_at > SILENCE_S:
                self._note_loss()
                return
            actor = self._actor
        actor.hear.remote().future().add_done_callback(partial(self._note_answer, actor))
        actor.poll.remote()

    def finish(self, ends_directly: bool) -> str | None:
        """Deliver the rest and end the process; return one line about what is undelivered, or None.
        `ends_directly` ends the process without Ray's GCS, which is gone."""
        with self._lock:
            self._is_finishing = True
            if ends_directly and self._actor is None:
                return NEVER_STARTED
        patience_s = HEADLESS_PATIENCE_S if ends_directly else PATIENCE_S
        undelivered: str | None = None
        for _ in range(NUM_LAST_TRIES):
            try:
                if self._is_lost and not ends_directly:
                    self._start_actor(is_last=True)
                    ray.get(self._actor.hear.remote(), timeout=START_PATIENCE_S)
                answer = self._actor.finish.remote(patience_s)
                undelivered = ray.get(answer, timeout=2 * patience_s)
                break
            except ray.exceptions.GetTimeoutError:
                undelivered = (
                    f"the run's observer did not answer for {2 * patience_s:g} s: its deliveries "
                    "may lack the end of the run until the run is resumed"
                )
                break
            except (ray.exceptions.RayError, ObserverNotStarted) as error:
                last_line = str(error).strip().split("\n")[-1]
                undelivered = f"the observer failed {self._num_losses + 1} times: {last_line}"
                is_loss = isinstance(error, ray.exceptions.RayActorError | ObserverNotStarted)
                if not is_loss or ends_directly:
                    break
                self._note_loss()
        if self._actor is not None:
            end = self._actor.end.remote if ends_directly else partial(ray.kill, self._actor)
            with suppress(ray.exceptions.RayError):
                end()
        return undelivered

    def _note_answer(self, actor: Any, answer: Future[None]) -> None:
        """Note that the observer answers, or is lost; called on a thread of Ray's."""
        if actor is not self._actor:
            return
        if answer.exception() is None:
            self._heard_at = time.monotonic()
        elif not self._is_lost:
            self._note_loss()

    def _note_loss(self) -> None:
        self._num_losses += 1
        self._is_lost = True
        pause_s = backoff_s(FIRST_BACKOFF_S, self._num_losses, MAX_BACKOFF_S)
        self._start_at = time.monotonic() + pause_s

    def _start_actor(self, is_last: bool = False) -> None:
        """Start another process. Without Ray's GCS this takes long, so it holds no lock; if
        `finish` has begun meanwhile, it starts its own. Raises `ObserverNotStarted` if `is_last`.
        """
        if self._actor is not None:
            with suppress(ray.exceptions.RayError):
                ray.kill(self._actor)  # it may hang
        try:
            actor = self._start()
        except (ray.exceptions.RayError, ValueError) as error:
            if is_last:
                raise ObserverNotStarted(str(error)) from error
            self._note_loss()
            return
        with self._lock:
            if is_last or not self._is_finishing:
                self._actor = actor
                self._is_lost, self._heard_at = False, time.monotonic()
                return
        with suppress(ray.exceptions.RayError):
            ray.kill(actor)


def make_observers(
    run_name: str, factories: Sequence[Factory], orphan_timeout_s: float, epoch: int, is_heir: bool
) -> list[SupervisedObserver]:
    """The run's observers, not started yet; an heir takes over those of the controller before."""
    survivors = find_actors(run_name, "observer") if is_heir else {}

    def start(number: int) -> Any:
        return (
            ray.remote(concurrency_groups=RayObserver.GROUPS)(RayObserver)
            .options(
                name=f"{run_name}:observer-{number}-{epoch}-{time.monotonic_ns()}",
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                enable_task_events=False,
                resources=ON_HEAD,
            )
            .remote(factories[number], run_name, orphan_timeout_s)
        )

    def newest(number: int) -> Any:
        names = [name for name in survivors if name.split("-")[1] == str(number)]
        if not names:
            return None
        return survivors[max(names, key=lambda name: int(name.rpartition("-")[2]))]

    return [SupervisedObserver(partial(start, n), newest(n)) for n in range(len(factories))]
