"""preStop hook of a Kubernetes pod: announce the end, then wait until no worker trains there.

Run it as `python -m actors.notices.drain SECONDS`. Kubernetes sends SIGTERM only after the hook.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

from actors.notices.pod import FILE

TRAINS = "ray::RayWorker"
"""The prefix of the process names that Ray gives to this project's workers."""
LOOK_EVERY_S = 0.5


def drain(timeout_s: float, file: Path = FILE) -> int:
    """Announce the end of this machine and wait for its workers, at most `timeout_s`; return how
    many are left. The time in the file is by this machine's clock, as is the agent's."""
    deadline = time.monotonic() + timeout_s
    file.write_text(f"{time.time() + timeout_s:.0f}\n")
    while (left := num_workers_here()) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return left


def num_workers_here() -> int:
    """The number of workers that run on this machine."""
    return sum(process.name().startswith(TRAINS) for process in psutil.process_iter(["name"]))


if __name__ == "__main__":
    print(f"{drain(float(sys.argv[1]))} workers left")
