"""The driver of a run: joins or starts a Ray cluster, starts a controller, follows the run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray

from actors.controller.layout_requests import LayoutReply
from actors.controller.run import RunSpec
from actors.ray_backend.actor_names import (
    NAMESPACE,
    actor_names,
    actor_of,
    controller_name,
    end_actors,
)
from actors.ray_backend.cluster.connection import check_reachable, in_one_line, join
from actors.ray_backend.cluster.ray_private import (
    ON_HEAD,
    SYSTEM_CONFIG,
    make_token,
    private_processes,
    silence_driver_logs,
    take_token,
    without_unused_services,
)
from actors.ray_backend.cluster.sessions import Guard
from actors.ray_backend.controller import CONTROLLER_GROUPS, DriverReport, RayController
from actors.storage.errors import (
    ClusterNotStarted,
    ControllerLost,
    ControllerRestarting,
    RunNotDriven,
    RunRefused,
    RunTaken,
)
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.commands import Stopped

SHOW_EVERY_S = 0.5
ASK_EVERY_S = 2.0
ANSWER_TIMEOUT_S = 120.0
RESTART_PATIENCE_S = 180.0
ENDING_PATIENCE_S = 300.0
"""How long a new driver waits for the last checkpoint of the same run, which is stopping."""
LONE_PATIENCE_S = 15.0
"""How long the driver waits for an answer of the controller if Ray's GCS is gone."""
HEADLESS_LEAVE_S = 3.0
LOST_WITH_HEAD = "Ray's head process (the GCS) is gone, too: no checkpoint was saved at the end"
_TAKEN = "{}: a controller on this cluster drives this run; stop it, or choose another --run-name"
_NO_ROOM = (
    "another run of this process has started a local Ray cluster with CPUs for its own workers "
    "only: wait for its end, or call ray.init(num_cpus=...) before both runs"
)
_NOT_IMPORTED = (
    "{} on the cluster, where the recipe needs it: put it beside the script, install it there, or "
    "send it along with ray.init(runtime_env={{'working_dir': '.'}}) or `ray job submit "
    "--working-dir .`"
)


class _Hold:
    """This process's connection to Ray: whether a run has opened it, and how many runs use it. The
    last one leaves Ray."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_ours = False
        self.is_local = False
        self.num_runs = 0
        self.guard: Guard | None = None
        """The guard of the private cluster."""


_hold = _Hold()


def join_or_start_cluster(
    address: str | None,
    num_workers: int,
    use_gpus: bool,
    namespace: str,
    per_worker: Mapping[str, Any] | None = None,
) -> bool:
    """Join the cluster at `address`, or the one that `ray start` recorded, or start a private one;
    return whether one was started.

    If the process has initialized Ray already, the run uses that and leaves it as it is. A private
    cluster (also with `address="local"`) has the resources `per_worker` for each worker and ends
    with this process; no other command joins it. Raises OSError if an address is given and nothing
    answers there, `ClusterNotJoined`, `ClusterNotStarted`, or `RunRefused` if another run's workers
    fill a private one.
    """
    with _hold.lock:
        if ray.is_initialized():
            if _hold.is_ours and _hold.is_local and _hold.num_runs:
                raise RunRefused(_NO_ROOM)
            _hold.num_runs += 1
            return False
        common = _common(namespace)
        joined = address != "local" and join(address, common)
        if not joined:
            _start(_slots(num_workers, use_gpus, per_worker or {}) | common)
        silence_driver_logs()
        _hold.is_ours, _hold.is_local, _hold.num_runs = True, not joined, 1
    return not joined


def _start(options: dict[str, Any]) -> None:
    """Start a private cluster, which signals to this process's group do not reach."""
    try:
        make_token()
        _hold.guard = Guard()
        with private_processes(_hold.guard), without_unused_services():
            ray.init(
                address="local",
                include_dashboard=False,
                _system_config=dict(SYSTEM_CONFIG),
                **options,
            )
    except Exception as error:  # Ray raises the error of the cause, or a bare Exception
        keep_logs()
        ray.shutdown()
        _end_private_cluster()
        raise ClusterNotStarted(in_one_line(error)) from error


def _slots(num_workers: int, use_gpus: bool, per_worker: Mapping[str, Any]) -> dict[str, Any]:
    """The resources of a local cluster that has a slot for each worker."""
    others = per_worker.get("resources", {})
    return {
        "num_cpus": math.ceil(num_workers * max(1.0, per_worker.get("num_cpus", 1.0))),
        **({"num_gpus": num_workers} if use_gpus else {}),
        **({"resources": {k: num_workers * v for k, v in others.items()}} if others else {}),
    }


def join_cluster(address: str, namespace: str) -> None:
    """Join the cluster of a run, at `address`. Raises OSError if nothing answers there."""
    with _hold.lock:
        take_token()
        join(address, _common(namespace))
        silence_driver_logs()
        _hold.is_ours, _hold.is_local, _hold.num_runs = True, False, 1


def join_existing_cluster(address: str | None, namespace: str) -> bool:
    """Join the cluster at `address`, or the one that `ray start` recorded; return whether joined.

    Raises OSError if an address is given and nothing answers there.
    """
    take_token()
    joined = join(address, _common(namespace))
    if joined:
        silence_driver_logs()
    return joined


def _common(namespace: str) -> dict[str, Any]:
    return {"namespace": namespace, "log_to_driver": False, "logging_level": "error"}


def close_cluster(run_name: str, keep_actors: bool) -> None:
    """End the run's actors unless `keep_actors`, and leave Ray, unless the user initialized it or
    another run of this process uses it."""
    if not ray.is_initialized():
        return
    is_gone = is_head_gone()
    if is_gone:
        keep_actors = True  # Ray cannot end them: they end as orphans, or with a private cluster
    if not keep_actors:
        with suppress(ray.exceptions.RayError):  # the cluster is gone, and its actors with it
            end_actors(run_name)
    with _hold.lock:
        _hold.num_runs -= 1
        if _hold.is_ours and _hold.num_runs <= 0:
            _hold.is_ours = False
            _leave_ray(is_gone)
            _end_private_cluster()


def _leave_ray(is_head_gone: bool) -> None:
    """Leave Ray. Without the GCS this takes up to a minute, so let it run on in the background."""
    if not is_head_gone:
        ray.shutdown()
        return
    leaving = threading.Thread(target=ray.shutdown, name="leave-ray", daemon=True)
    leaving.start()
    leaving.join(HEADLESS_LEAVE_S)


def is_head_gone() -> bool:
    """Whether nothing listens at the address of the GCS of the cluster that was joined."""
    try:
        check_reachable(ray.get_runtime_context().gcs_address)
    except OSError:
        return True
    return False


def is_private() -> bool:
    """Whether this process has started a private cluster."""
    return _hold.guard is not None


def keep_logs() -> None:
    """Keep Ray's log files of a private cluster after its end, since a run on it has failed."""
    if _hold.guard is not None:
        _hold.guard.keep_session()


def _end_private_cluster() -> None:
    guard, _hold.guard = _hold.guard, None
    if guard is not None:
        guard.close()


class Drive:
    """A running run, as its driver sees it."""

    def __init__(self, run: RunSpec) -> None:
        """Start a controller. Raises `RunTaken` if another process drives the run, `RunRefused` if
        it cannot be opened."""
        self.began = time.time()
        name = controller_name(run.name)
        if name in actor_names():
            _await_end(name)
        kind = ray.remote(concurrency_groups=CONTROLLER_GROUPS)(RayController).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            enable_task_events=False,
            resources=ON_HEAD,
            scheduling_strategy="DEFAULT",  # not in the placement group of a Tune trial
        )
        try:
            self._controller = kind.remote(run)
        except ValueError:  # another driver has just taken the name
            raise RunTaken(_TAKEN.format(run.name)) from None
        self._stop_cause = ""
        _call(lambda: self._controller.progress.remote(0.0))

    def request_stop(self, cause: str) -> None:
        self._stop_cause = cause
        self._controller.request_stop.remote(cause)

    def follow(self, each: Callable[[DriverReport], None]) -> DriverReport:
        """Wait for the end of the run. Call `each` twice a second, even while a dead controller has
        not restarted yet. Raises `ControllerLost`."""
        progress, answered_at = DriverReport(), time.monotonic()
        while progress.outcome is None:
            query = self._controller.progress.remote(ASK_EVERY_S)
            began = time.monotonic()
            while time.monotonic() - began < ANSWER_TIMEOUT_S:
                if ray.wait([query], timeout=SHOW_EVERY_S)[0]:
                    break
                each(progress)
                if time.monotonic() - began > LONE_PATIENCE_S and is_head_gone():
                    raise ControllerLost(LOST_WITH_HEAD)
            try:
                progress, answered_at = _answer(query), time.monotonic()
            except ControllerRestarting as error:
                if time.monotonic() - answered_at > RESTART_PATIENCE_S:
                    raise ControllerLost(str(error)) from None
                if is_head_gone():  # Ray cannot restart it
                    raise ControllerLost(LOST_WITH_HEAD) from None
                time.sleep(SHOW_EVERY_S)
                if self._stop_cause:  # the controller may have died before it got the request
                    self.request_stop(self._stop_cause)
        each(progress)
        return progress


def send_layout_request(
    run_name: str, target_layout: TargetLayout, patience_s: float
) -> LayoutReply:
    """Request another layout from the controller of a run on this cluster, from any process.

    The request is repeated if the controller restarts. Raises `RunNotDriven` or `ControllerLost`.
    """
    try:
        controller = actor_of(controller_name(run_name))
    except ValueError:
        raise RunNotDriven(run_name) from None
    reply: LayoutReply = _call(
        lambda: controller.send_layout_request.remote(target_layout, patience_s),
        patience_s + ANSWER_TIMEOUT_S,
    )
    return reply


def _await_end(name: str) -> None:
    """Wait for a controller of the same run that is stopping, or that has lost its driver and so
    will stop; then end it. Raises `RunTaken` if it is at work."""
    try:
        controller = actor_of(name)
    except ValueError:
        return  # it has ended meanwhile
    began, silence_s = time.monotonic(), 0.0
    while (progress := _call(lambda: controller.progress.remote(0.0))).outcome is None:
        has_driver = progress.is_detached or progress.driver_silence_s < silence_s
        is_at_work = has_driver and not progress.is_stopping
        if is_at_work or time.monotonic() - began > ENDING_PATIENCE_S:
            raise RunTaken(_TAKEN.format(name.rpartition(":")[0]))
        silence_s = progress.driver_silence_s
        time.sleep(SHOW_EVERY_S)
    with suppress(ValueError):  # it has ended meanwhile
        ray.kill(actor_of(name))


def _call(send: Callable[[], Any], timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Send a call and return its answer; repeat it while the controller may be restarting. Raises
    `ControllerLost`."""
    began = time.monotonic()
    while True:
        try:
            return _answer(send(), timeout_s)
        except ControllerRestarting as error:
            if time.monotonic() - began > RESTART_PATIENCE_S:
                raise ControllerLost(str(error)) from None
            time.sleep(SHOW_EVERY_S)


def _answer(call: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """The answer to a call of the controller. Raises `RunTaken`, `RunRefused`, `ControllerLost`, or
    `ControllerRestarting` if the controller may restart."""
    try:
        return ray.get(call, timeout=timeout_s)
    except ray.exceptions.ActorUnavailableError as error:
        raise ControllerRestarting(str(error).strip().splitlines()[-1]) from None
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        for kind in (RunTaken, RunRefused):
            parts = [line.partition(f"{kind.__name__}: ") for line in lines]
            if messages := [message for _, separator, message in parts if separator]:
                raise kind(messages[-1]) from None
        if lines[-1].startswith("ModuleNotFoundError: "):
            raise RunRefused(_NOT_IMPORTED.format(lines[-1].partition(": ")[2])) from None
        raise ControllerLost(lines[-1]) from None


EXIT_CODES = {"completed": 0, "failed": 1, "user_error": 2}


def exit_code(outcome: Stopped, signal_number: int) -> int:
    """The exit code: 0 completed, 1 failed, 2 user error, 130 or 143 interrupted."""
    if outcome.outcome == "interrupted":
        return 128 + (signal_number or 2)
    return EXIT_CODES[outcome.outcome]
