"""The driver's side: find or start a Ray cluster, start a controller, follow it to the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from actors.errors import RunTaken
from actors.ray_controller import CONTROLLER_GROUPS, Progress, RayController, Run
from elastic.commands import Stopped

FOLLOW_S = 0.2
BEGIN_TIMEOUT_S = 120.0


def join_or_start_cluster(num_workers: int, use_gpus: bool, namespace: str) -> bool:
    """Join the cluster at hand, or start a local one with a slot a worker; True if started.

    Raises ConnectionError if an address is named (RAY_ADDRESS) and nobody answers there.
    """
    common: dict[str, Any] = {
        "namespace": namespace,
        "log_to_driver": False,
        "configure_logging": True,
        "logging_level": "error",
    }
    try:
        ray.init(address="auto", **common)
        return False
    except ConnectionError:
        if ray.util.get_node_ip_address is None:  # pragma: no cover
            raise
    slots = {"num_gpus": num_workers} if use_gpus else {}
    ray.init(
        address="local",
        num_cpus=num_workers,
        include_dashboard=False,
        **slots,
        **common,
    )
    return True


class Drive:
    """A run under way, as its driver sees it."""

    def __init__(self, run: Run) -> None:
        """Raises `RunTaken` if the run is being driven already."""
        self._controller = (
            ray.remote(RayController)
            .options(
                name=f"{run.name}:controller",
                lifetime="detached",
                num_cpus=0,
                concurrency_groups=CONTROLLER_GROUPS,
            )
            .remote(run)
        )
        self.progress()

    def progress(self) -> Progress:
        """Where the run stands. Raises `RunTaken`, or Ray's error if the controller died."""
        asked = self._controller.progress.options(concurrency_group="driver").remote()
        try:
            progress: Progress = ray.get(asked, timeout=BEGIN_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            if "RunTaken" in str(error):
                said = [line for line in str(error).splitlines() if "RunTaken" in line]
                raise RunTaken(said[-1].partition("RunTaken: ")[2]) from None
            raise
        return progress

    def request_stop(self, cause: str) -> None:
        self._controller.request_stop.options(concurrency_group="driver").remote(cause)

    def follow(self, each: Callable[[], None]) -> Progress:
        """Wait for the end, calling `each` several times a second."""
        while True:
            progress = self.progress()
            each()
            if progress.outcome is not None:
                return progress
            time.sleep(FOLLOW_S)

    def close(self) -> None:
        """The controller has ended everything else by itself."""
        ray.kill(self._controller)


EXIT_CODES = {"completed": 0, "failed": 1, "user_error": 2}


def exit_code(outcome: Stopped, signal_number: int) -> int:
    """0 completed, 1 failed, 2 user error, 130 or 143 interrupted."""
    if outcome.outcome == "interrupted":
        return 128 + (signal_number or 2)
    return EXIT_CODES[outcome.outcome]
