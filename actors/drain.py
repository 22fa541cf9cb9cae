"""Before a pod is ended: tell Ray that its node drains, and wait until nobody trains there.

`python -m actors.drain SECONDS`, as a preStop hook: Kubernetes sends SIGTERM only after it, and
`ray start --block`, which gets that, ends all of the node at once.
"""

from __future__ import annotations

import sys
import time

import psutil
import ray

from actors.ray_private import drain_this_node, take_token

TRAINS = "ray::RayWorker"
"""So Ray names the processes of our workers, followed by what they are called for."""
LOOK_EVERY_S = 0.5


def drain(timeout_s: float) -> int:
    """Wait so long at most; return how many workers are left on this machine then."""
    deadline = time.monotonic() + timeout_s
    take_token()
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    drain_this_node("the pod is being ended", timeout_s)
    ray.shutdown()
    while (left := num_workers_here()) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return left


def num_workers_here() -> int:
    """How many processes of this machine train."""
    return sum(process.name().startswith(TRAINS) for process in psutil.process_iter(["name"]))


if __name__ == "__main__":
    print(f"{drain(float(sys.argv[1]))} workers left")
