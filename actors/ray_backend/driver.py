"""The driver's side: find or start a Ray cluster, start a controller, follow it to the end."""

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
from actors.ray_backend.actor_names import NAMESPACE, actor_names, actor_of
from actors.ray_backend.cluster.connection import in_one_line, join, knock
from actors.ray_backend.cluster.ray_private import (
    ON_HEAD,
    SYSTEM_CONFIG,
    end_log_monitor,
    make_token,
    private_processes,
    silence_driver_logs,
    take_token,
)
from actors.ray_backend.cluster.sessions import Guard
from actors.ray_backend.controller import CONTROLLER_GROUPS, DriverReport, RayController
from actors.storage.errors import (
    ClusterNotStarted,
    ControllerAway,
    ControllerLost,
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
"""For the last checkpoint of a run that has been stopped, before the same run is begun again."""
LONE_PATIENCE_S = 15.0
"""For an answer of the controller where Ray's GCS is gone."""
HEADLESS_LEAVE_S = 3.0
LOST_WITH_HEAD = "Ray's head process, the GCS, is gone, too: no checkpoint was saved at the end"
_TAKEN = (
    "{}: a controller on this cluster drives this run; stop that one, or choose another --run-name"
)
_NO_ROOM = (
    "another run of this process has started a local Ray, with room for its own workers: wait for "
    "its end, or call ray.init(num_cpus=...) before both"
)
_NOT_IMPORTED = (
    "{} on the cluster, where the recipe needs it: put it beside the script, install it there, or "
    "send it along with ray.init(runtime_env={{'working_dir': '.'}}) or `ray job submit "
    "--working-dir .`"
)


class _Hold:
    """Whether this process has Ray from us, and how many runs here use it: the last one leaves."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_ours = False
        self.is_local = False
        self.num_runs = 0
        self.guard: Guard | None = None
        """Of the private cluster."""


_hold = _Hold()


def join_or_start_cluster(
    address: str | None,
    num_workers: int,
    use_gpus: bool,
    namespace: str,
    per_worker: Mapping[str, Any] | None = None,
) -> bool:
    """Join the cluster at `address`, or the one that `ray start` has recorded, or start a private
    one; True if started.

    Where the process has Ray already, that is used, and left as it is. A private one (also on
    `address="local"`) has a slot a worker, of what it asks for `per_worker`, ends with this
    process, and is joined by no other command. Raises OSError if an address is named and nobody
    answers there, `ClusterNotJoined`, `ClusterNotStarted`, or `RunRefused` if a private one is full
    of another run's workers.
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
    """Start a private cluster, which no signal to this process's group reaches."""
    try:
        make_token()
        _hold.guard = Guard()
        with private_processes(_hold.guard):
            ray.init(
                address="local",
                include_dashboard=False,
                _system_config=dict(SYSTEM_CONFIG),
                **options,
            )
        end_log_monitor()
    except Exception as error:  # Ray raises what its cause raised, or a bare Exception
        keep_logs()
        ray.shutdown()
        _end_private_cluster()
        raise ClusterNotStarted(in_one_line(error)) from error


def _slots(num_workers: int, use_gpus: bool, per_worker: Mapping[str, Any]) -> dict[str, Any]:
    """The resources of a local cluster on which so many workers find a place."""
    others = per_worker.get("resources", {})
    return {
        "num_cpus": math.ceil(num_workers * max(1.0, per_worker.get("num_cpus", 1.0))),
        **({"num_gpus": num_workers} if use_gpus else {}),
        **({"resources": {k: num_workers * v for k, v in others.items()}} if others else {}),
    }


def join_cluster(address: str, namespace: str) -> None:
    """Join the cluster of a run, at `address`. Raises OSError if nobody answers there."""
    with _hold.lock:
        take_token()
        join(address, _common(namespace))
        silence_driver_logs()
        _hold.is_ours, _hold.is_local, _hold.num_runs = True, False, 1


def join_cluster_at_hand(address: str | None, namespace: str) -> bool:
    """Join the cluster at `address`, or the one that `ray start` has recorded; True if joined.

    Raises OSError if an address is named and nobody answers there.
    """
    take_token()
    joined = join(address, _common(namespace))
    if joined:
        silence_driver_logs()
    return joined


def _common(namespace: str) -> dict[str, Any]:
    return {"namespace": namespace, "log_to_driver": False, "logging_level": "error"}


def close_cluster(run_name: str, keep_actors: bool) -> None:
    """Leave Ray, unless it was there before, or another run here uses it; and unless the run was
    detached, end every actor that it still has."""
    if not ray.is_initialized():
        return
    is_gone = is_head_gone()
    if is_gone:
        keep_actors = True  # Ray cannot end them: they end as orphans, or with a private cluster
    if not keep_actors:
        with suppress(ray.exceptions.RayError):  # the cluster is gone, and all actors with it
            end_actors(run_name)
    with _hold.lock:
        _hold.num_runs -= 1
        if _hold.is_ours and _hold.num_runs <= 0:
            _hold.is_ours = False
            _leave_ray(is_gone)
            _end_private_cluster()


def _leave_ray(is_head_gone: bool) -> None:
    """Without the GCS, Ray waits for its answer up to a minute: it may do so beside."""
    if not is_head_gone:
        ray.shutdown()
        return
    leaving = threading.Thread(target=ray.shutdown, name="leave-ray", daemon=True)
    leaving.start()
    leaving.join(HEADLESS_LEAVE_S)


def is_head_gone() -> bool:
    """Whether nothing listens at the address of the GCS of the cluster that was joined."""
    try:
        knock(ray.get_runtime_context().gcs_address)
    except OSError:
        return True
    return False


def is_private() -> bool:
    """Whether this process has started the cluster."""
    return _hold.guard is not None


def keep_logs() -> None:
    """Keep Ray's log files of a private cluster after its end: a run on it has failed."""
    if _hold.guard is not None:
        _hold.guard.keep_session()


def _end_private_cluster() -> None:
    guard, _hold.guard = _hold.guard, None
    if guard is not None:
        guard.close()


def end_actors(run_name: str) -> None:
    """End every actor that a run still has on the cluster that was joined."""
    for name in actor_names():
        if name.startswith(f"{run_name}:"):
            _end(name)


def _end(name: str) -> None:
    try:
        ray.kill(actor_of(name))
    except ValueError:
        return  # it has ended meanwhile


class Drive:
    """A run under way, as its driver sees it."""

    def __init__(self, run: RunSpec) -> None:
        """Start a controller. Raises `RunTaken` if the run is being driven already, `RunRefused`
        if it cannot be opened."""
        self.began = time.time()
        name = _controller_name(run.name)
        if name in actor_names():
            _clear_away(name)
        kind = ray.remote(concurrency_groups=CONTROLLER_GROUPS)(RayController).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            enable_task_events=False,
            resources=ON_HEAD,
            scheduling_strategy="DEFAULT",  # not in the placement group of a trial that starts it
        )
        try:
            self._controller = kind.remote(run)
        except ValueError:  # the name has just been taken
            raise RunTaken(_TAKEN.format(run.name)) from None
        self._stop_cause = ""
        _insist(lambda: self._controller.progress.remote(0.0))

    def request_stop(self, cause: str) -> None:
        self._stop_cause = cause
        self._controller.request_stop.remote(cause)

    def follow(self, each: Callable[[DriverReport], None]) -> DriverReport:
        """Wait for the end, telling `each` twice a second, also while the controller has died and
        is not back yet. Raises `ControllerLost`."""
        progress, heard = DriverReport(), time.monotonic()
        while progress.outcome is None:
            asked = self._controller.progress.remote(ASK_EVERY_S)
            began = time.monotonic()
            while time.monotonic() - began < ANSWER_TIMEOUT_S:
                if ray.wait([asked], timeout=SHOW_EVERY_S)[0]:
                    break
                each(progress)
                if time.monotonic() - began > LONE_PATIENCE_S and is_head_gone():
                    raise ControllerLost(LOST_WITH_HEAD)
            try:
                progress, heard = _answer(asked), time.monotonic()
            except ControllerAway as error:
                if time.monotonic() - heard > RESTART_PATIENCE_S:
                    raise ControllerLost(str(error)) from None
                if is_head_gone():  # nobody restarts it
                    raise ControllerLost(LOST_WITH_HEAD) from None
                time.sleep(SHOW_EVERY_S)
                if self._stop_cause:  # it may have died before it heard
                    self.request_stop(self._stop_cause)
        each(progress)
        return progress


def ask_for_layout(run_name: str, target_layout: TargetLayout, patience_s: float) -> LayoutReply:
    """Ask the controller of a run on this cluster for another layout, from any process.

    Raises `RunNotDriven` or `ControllerLost`. Whatever it may have missed it is asked again.
    """
    try:
        controller = actor_of(_controller_name(run_name))
    except ValueError:
        raise RunNotDriven(run_name) from None
    reply: LayoutReply = _insist(
        lambda: controller.ask_for_layout.remote(target_layout, patience_s),
        patience_s + ANSWER_TIMEOUT_S,
    )
    return reply


def _controller_name(run_name: str) -> str:
    return f"{run_name}:controller"


def _clear_away(name: str) -> None:
    """A controller that has finished may still stand there; one that has been stopped, or has
    lost its driver and therefore will stop, is waited for; one at work refuses."""
    try:
        controller = actor_of(name)
    except ValueError:
        return  # it has ended meanwhile
    began, silence_s = time.monotonic(), 0.0
    while (progress := _insist(lambda: controller.progress.remote(0.0))).outcome is None:
        has_driver = progress.is_detached or progress.driver_silence_s < silence_s
        is_at_work = has_driver and not progress.is_stopping
        if is_at_work or time.monotonic() - began > ENDING_PATIENCE_S:
            raise RunTaken(_TAKEN.format(name.rpartition(":")[0]))
        silence_s = progress.driver_silence_s
        time.sleep(SHOW_EVERY_S)
    _end(name)


def _insist(ask: Callable[[], Any], timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Ask again for as long as the controller may be restarting. Raises `ControllerLost`."""
    began = time.monotonic()
    while True:
        try:
            return _answer(ask(), timeout_s)
        except ControllerAway as error:
            if time.monotonic() - began > RESTART_PATIENCE_S:
                raise ControllerLost(str(error)) from None
            time.sleep(SHOW_EVERY_S)


def _answer(asked: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Raises `RunRefused`, `ControllerLost`, or `ControllerAway` if it may come back."""
    try:
        return ray.get(asked, timeout=timeout_s)
    except ray.exceptions.ActorUnavailableError as error:
        raise ControllerAway(str(error).strip().splitlines()[-1]) from None
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        for kind in (RunTaken, RunRefused):
            told = [line.partition(f"{kind.__name__}: ") for line in lines]
            if why := [message for _, found, message in told if found]:
                raise kind(why[-1]) from None
        if lines[-1].startswith("ModuleNotFoundError: "):
            raise RunRefused(_NOT_IMPORTED.format(lines[-1].partition(": ")[2])) from None
        raise ControllerLost(lines[-1]) from None


EXIT_CODES = {"completed": 0, "failed": 1, "user_error": 2}


def exit_code(outcome: Stopped, signal_number: int) -> int:
    """0 completed, 1 failed, 2 user error, 130 or 143 interrupted."""
    if outcome.outcome == "interrupted":
        return 128 + (signal_number or 2)
    return EXIT_CODES[outcome.outcome]
