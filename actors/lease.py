"""Who drives a run: a lease with an epoch, checked before every write that others rely on.

Claiming an epoch is creating its file exclusively, so that of two claimants one loses. The owner
touches the file; it is stale when the owner is known to be dead, or has not touched it for
`STALE_S`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from actors.errors import LeaseLost, RunTaken

STALE_S = 15.0


class Lease:
    """The right to write a run's journal and manifests, as long as nobody took a later epoch."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self._folder = folder
        self.epoch = epoch

    def check(self) -> None:
        """Raises `LeaseLost` once another controller has claimed the run."""
        if (self._folder / str(self.epoch + 1)).exists():
            raise LeaseLost(f"epoch {self.epoch} of {self._folder.parent} is over")

    def renew(self) -> None:
        os.utime(self._folder / str(self.epoch))

    def release(self) -> None:
        """Nobody drives the run now: the next claimant need not wait."""
        (self._folder / str(self.epoch)).write_text(json.dumps({"released": True}))


def claim(run_folder: Path, cluster: str = "") -> Lease:
    """Take the run. Raises `RunTaken` if somebody drives it.

    `cluster` is the address of the Ray cluster on which this happens: others find it by it.
    """
    folder = run_folder / "lease"
    folder.mkdir(parents=True, exist_ok=True)
    newest = _newest(folder)
    owner = owner_of(run_folder)
    if owner:
        raise RunTaken(
            f"{run_folder}: process {owner.get('pid')} on {owner.get('host')} drives this run; "
            "stop that one, or choose another --run-name"
        )
    try:
        with open(folder / str(newest + 1), "x") as out:
            json.dump({**_myself(), "cluster": cluster}, out)
    except FileExistsError:
        raise RunTaken(f"{run_folder}: somebody else has just begun to drive this run") from None
    if newest:
        (folder / str(newest)).unlink(missing_ok=True)
    return Lease(folder, newest + 1)


def owner_of(run_folder: Path) -> dict[str, Any] | None:
    """Who drives the run now, as he has said himself; None if nobody does."""
    folder = run_folder / "lease"
    newest = _newest(folder) if folder.exists() else 0
    if not newest:
        return None
    file = folder / str(newest)
    owner: dict[str, Any] = json.loads(file.read_text() or "{}")
    if owner.get("host") == socket.gethostname():
        is_alive = _is_running(owner["pid"], owner["started"])
    else:
        is_alive = time.time() - file.stat().st_mtime <= STALE_S
    return owner if is_alive and not owner.get("released") else None


def _newest(folder: Path) -> int:
    return max((int(entry.name) for entry in folder.iterdir()), default=0)


def _myself() -> dict[str, object]:
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "pid": process.pid,
        "started": process.create_time(),
    }


def _is_running(pid: int, started: float) -> bool:
    try:
        return bool(abs(psutil.Process(pid).create_time() - started) < 1.0)
    except psutil.NoSuchProcess:
        return False
