"""The driver's side: find or start a Ray cluster, start a controller, follow it to the end."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import ray

from actors.asking import LayoutReply
from actors.errors import ControllerLost, RunNotDriven, RunTaken
from actors.ray_controller import CONTROLLER_GROUPS, Progress, RayController, Run
from actors.ray_private import end_log_monitor, hush_driver, take_token
from elastic.commands import Stopped
from elastic.planning import Wish

SHOW_EVERY_S = 0.5
ASK_EVERY_S = 2.0
ANSWER_TIMEOUT_S = 120.0
KNOCK_TIMEOUT_S = 2.0


def join_or_start_cluster(
    address: str | None, num_workers: int, use_gpus: bool, namespace: str
) -> bool:
    """Join the cluster at `address`, or the one at hand, or start a local one; True if started.

    A local one (also on `address="local"`) has a slot a worker, and ends with this process.
    Raises OSError if an address is named and nobody answers there.
    """
    common = _common(namespace)
    joined = address != "local" and _join(address, common)
    if not joined:
        slots: dict[str, Any] = {"num_gpus": num_workers} if use_gpus else {}
        ray.init(address="local", num_cpus=num_workers, include_dashboard=False, **slots, **common)
        end_log_monitor()
    hush_driver()
    return not joined


def join_cluster(address: str, namespace: str) -> None:
    """Join the cluster of a run, at `address`. Raises OSError if nobody answers there."""
    take_token()
    _join(address, _common(namespace))
    hush_driver()


def _common(namespace: str) -> dict[str, Any]:
    return {"namespace": namespace, "log_to_driver": False, "logging_level": "error"}


def _join(address: str | None, common: dict[str, Any]) -> bool:
    if address:
        _knock(address)
    try:
        ray.init(address=address or "auto", **common)
    except ConnectionError:
        if address:
            raise
        return False
    return True


def _knock(address: str) -> None:
    """Ray itself would try for more than a minute. Raises OSError if nobody listens there."""
    host, colon, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_TIMEOUT_S).close()


def close_cluster(run_name: str, keep_actors: bool) -> None:
    """Leave Ray; unless the run was detached, end every actor that it still has."""
    if not ray.is_initialized():
        return
    if not keep_actors:
        end_actors(run_name)
    ray.shutdown()


def end_actors(run_name: str) -> None:
    """End every actor that a run still has on the cluster that was joined."""
    for name in ray.util.list_named_actors():
        if name.startswith(f"{run_name}:"):
            _end(name)


def _end(name: str) -> None:
    try:
        ray.kill(ray.get_actor(name))
    except ValueError:
        return  # it has ended meanwhile


class Drive:
    """A run under way, as its driver sees it."""

    def __init__(self, run: Run) -> None:
        """Start a controller. Raises `RunTaken` if the run is being driven already."""
        name = _controller_name(run.name)
        if name in ray.util.list_named_actors():
            _clear_away(name)
        self._controller = (
            ray.remote(concurrency_groups=CONTROLLER_GROUPS)(RayController)
            .options(name=name, lifetime="detached", num_cpus=0, enable_task_events=False)
            .remote(run)
        )
        _answer(self._controller.progress.remote(0.0))

    def request_stop(self, cause: str) -> None:
        self._controller.request_stop.remote(cause)

    def follow(self, each: Callable[[Progress], None]) -> Progress:
        """Wait for the end, telling `each` twice a second. Raises `ControllerLost`."""
        progress = Progress()
        while progress.outcome is None:
            asked = self._controller.progress.remote(ASK_EVERY_S)
            began = time.monotonic()
            while time.monotonic() - began < ANSWER_TIMEOUT_S:
                if ray.wait([asked], timeout=SHOW_EVERY_S)[0]:
                    break
                each(progress)
            progress = _answer(asked)
        each(progress)
        return progress


def ask_for_layout(run_name: str, wish: Wish, patience_s: float) -> LayoutReply:
    """Ask the controller of a run on this cluster for another layout, from any process.

    Raises `RunNotDriven` or `ControllerLost`.
    """
    try:
        controller = ray.get_actor(_controller_name(run_name))
    except ValueError:
        raise RunNotDriven(run_name) from None
    asked = controller.ask_for_layout.remote(wish, patience_s)
    reply: LayoutReply = _answer(asked, patience_s + ANSWER_TIMEOUT_S)
    return reply


def _controller_name(run_name: str) -> str:
    return f"{run_name}:controller"


def _clear_away(name: str) -> None:
    """A controller that has finished may still stand there; one at work refuses."""
    if _answer(ray.get_actor(name).progress.remote(0.0)).outcome is None:
        raise RunTaken(f"{name.partition(':')[0]}: a controller on this cluster drives this run")
    _end(name)


def _answer(asked: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    try:
        return ray.get(asked, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        taken = [line for line in lines if "RunTaken: " in line]
        if taken:
            raise RunTaken(taken[-1].partition("RunTaken: ")[2]) from None
        raise ControllerLost(lines[-1]) from None


EXIT_CODES = {"completed": 0, "failed": 1, "user_error": 2}


def exit_code(outcome: Stopped, signal_number: int) -> int:
    """0 completed, 1 failed, 2 user error, 130 or 143 interrupted."""
    if outcome.outcome == "interrupted":
        return 128 + (signal_number or 2)
    return EXIT_CODES[outcome.outcome]
