"""Before a pod is ended: tell the node's agent of the end, and wait until nobody trains there.

`python -m actors.notices.drain SECONDS`, as a preStop hook: Kubernetes sends SIGTERM only after it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

from actors.notices.pod import FILE

TRAINS = "ray::RayWorker"
"""So Ray names the processes of our workers, followed by what they are called for."""
LOOK_EVERY_S = 0.5


def drain(timeout_s: float, file: Path = FILE) -> int:
    """Wait so long at most; return how many workers are left on this machine then. The time in the
    file is by this machine's clock, as is what its agent makes of it."""
    deadline = time.monotonic() + timeout_s
    file.write_text(f"{time.time() + timeout_s:.0f}\n")
    while (left := num_workers_here()) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return left


def num_workers_here() -> int:
    """How many processes of this machine train."""
    return sum(process.name().startswith(TRAINS) for process in psutil.process_iter(["name"]))


if __name__ == "__main__":
    print(f"{drain(float(sys.argv[1]))} workers left")
