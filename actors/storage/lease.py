"""Who drives a run: a lease with an epoch, checked before every write that others rely on.

A claimant writes a file of the next epoch and looks again: if anybody else claims as well, he
withdraws. So of two at once at most one stays, on any storage where a list shows what was written
before (a disk, S3). The owner renews his file; it is stale when he is known to be dead, or has not
renewed it for `STALE_S`. An actor that Ray has restarted is the heir of its own dead process: it
waits for nothing.

The storage's clock alone says how old a file is: a claimant compares the owner's file with one that
it writes itself. So neither the owner's clock nor the claimant's matters.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from actors.storage.errors import LeaseLost, RunTaken
from actors.storage.storage import DiskStorage, Storage

FOLDER = "lease"
STALE_S, RENEW_EVERY_S = 15.0, 3.0
KNOCK_TIMEOUT_S = 1.0


class Lease:
    """The right to write a run's journal and manifests, as long as nobody took a later epoch."""

    def __init__(
        self, run: Storage, epoch: int, name: str, told: dict[str, Any], since: int
    ) -> None:
        self._run = run
        self._name = name
        self._told = told
        self._is_lost = False
        self._let_go = threading.Event()
        self._writing = threading.Lock()
        self.epoch = epoch
        self.since = since
        """From this epoch on nobody but this owner, or the same actor before, has had the run."""

    def check(self) -> None:
        """Raises `LeaseLost` once another controller has claimed the run; where to look takes
        time, that is as of the last renewal."""
        if isinstance(self._run, DiskStorage):
            self.look()
        elif self._is_lost:
            raise self._lost()

    def look(self) -> None:
        """Raises `LeaseLost` if another controller has claimed the run, or `OSError`."""
        self._is_lost = self._is_lost or max(_epochs(self._run), default=0) > self.epoch
        if self._is_lost:
            raise self._lost()

    def renew(self) -> None:
        """Say that the owner lives. Raises `LeaseLost`, or `OSError`."""
        self.look()
        with self._writing:
            if not self._let_go.is_set() and not _touch(self._run, self._name):
                self._write(**self._told)

    def keep(self, every_s: float = RENEW_EVERY_S) -> None:
        """Renew it from now on, in a thread of its own: storage may take its time, or fail."""
        serve = partial(self._serve, every_s)
        threading.Thread(target=serve, name="lease", daemon=True).start()

    def let_go(self) -> None:
        """Do not renew it any longer."""
        self._let_go.set()

    def _serve(self, every_s: float) -> None:
        while not self._let_go.wait(every_s):
            try:
                self.renew()
            except LeaseLost:
                return  # `check` tells it to those who write
            except Exception:  # not only OSError: without this thread, a live run would be taken
                continue  # the lease is tried again, and runs out if that lasts

    def release(self) -> None:
        """Nobody drives the run now: the next claimant need not wait. Writes nothing if the lease
        is lost."""
        self.let_go()
        with self._writing, suppress(LeaseLost):
            self.look()
            self._write(**self._told, released=True)

    def withdraw(self) -> None:
        self._run.remove(self._name)

    def _write(self, **told: object) -> None:
        self._run.write(self._name, json.dumps(told).encode())

    def _lost(self) -> LeaseLost:
        return LeaseLost(f"epoch {self.epoch} of {self._run.url} is over")


def claim(
    run: Storage,
    cluster: str = "",
    actor: str = "",
    stale_s: float = STALE_S,
    newer_than: int = 0,
) -> Lease:
    """Take the run. Raises `RunTaken` if somebody drives it.

    `cluster` is the address of the Ray cluster on which this happens: others find it by it. `actor`
    stays the same over an actor's restarts. A lease that was not renewed for `stale_s` is nobody's.
    The epoch is also newer than `newer_than`: files of older ones may have been removed.
    """
    older = _epochs(run)  # looked at once: nobody slips in between the question and the claim
    newest = _newest(run, older)
    mine = [told for told in newest if actor and told.get("actor") == actor]
    owner = None if mine else _living(newest, _Ages(run, stale_s), cluster)
    if owner and owner.get("is_damaged"):
        raise RunTaken(
            f"{run.at(owner['file']).url}: the lease cannot be read, and was written within the "
            f"last {stale_s:g} s; if no process drives this run, try again in {stale_s:g} s"
        )
    if owner:
        raise RunTaken(
            f"{run.url}: process {owner.get('pid')} on {owner.get('host')} drives this run; "
            "stop that one, or choose another --run-name"
        )
    epoch = max([newer_than, *older]) + 1
    name = f"{FOLDER}/{epoch}-{uuid.uuid4().hex[:8]}"
    since = mine[0]["since"] if mine else epoch
    told = {**_myself(), "cluster": cluster, "actor": actor, "since": since}
    lease = Lease(run, epoch, name, told, since)
    lease.renew()
    if sum(len(names) for other, names in _epochs(run).items() if other >= epoch) > 1:
        lease.withdraw()
        raise RunTaken(f"{run.url}: somebody else has just begun to drive this run")
    for names in older.values():
        for old in names:
            run.remove(old)
    return lease


def damaged_leases(run: Storage) -> list[str]:
    """The files of the newest epoch that cannot be read."""
    return [owner["file"] for owner in _newest(run, _epochs(run)) if owner.get("is_damaged")]


def owner_of(run: Storage) -> dict[str, Any] | None:
    """Who drives the run now, as he has said himself; None if nobody does.

    Nothing is written, so the reader's clock stands for the storage's.
    """
    return _living(_newest(run, _epochs(run)), _Ages(run, STALE_S, may_write=False))


def _newest(run: Storage, epochs: dict[int, list[str]]) -> list[dict[str, Any]]:
    """What those of the last epoch have said of themselves."""
    told: list[dict[str, Any]] = []
    for name in epochs[max(epochs)] if epochs else ():
        with suppress(FileNotFoundError):  # withdrawn meanwhile
            told.append({**_read_owner(run.read(name)), "file": name})
    return told


def _read_owner(content: bytes) -> dict[str, Any]:
    """What an owner has written; a file that is none of a lease is of nobody known."""
    try:
        told = json.loads(content)
        pid = int(told["pid"])
        if not 0 < pid < 2**31:
            raise ValueError(f"pid {pid}")
        texts = {key: str(told.get(key, "")) for key in ("host", "cluster", "actor")}
        return {
            **texts,
            "pid": pid,
            "started": float(told["started"]),
            "since": int(told.get("since", 0)),
            "released": told.get("released") is True,
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {"is_damaged": True, "host": "an unknown host", "pid": "?", "cluster": ""}


class _Ages:
    """Whether files are fresh by the storage's clock, which is asked for only if it is needed."""

    def __init__(self, run: Storage, stale_s: float, may_write: bool = True) -> None:
        self._run = run
        self._stale_s = stale_s
        self._may_write = may_write

    def is_fresh(self, name: str) -> bool:
        """If the storage does not tell times, a file that is there counts as fresh."""
        renewed = self._run.modified(name)
        if renewed is None:
            return self._run.size(name) is not None
        return self._now() - renewed <= self._stale_s

    def _now(self) -> float:
        if not self._may_write:
            return time.time()
        name = f"{FOLDER}/clock-{uuid.uuid4().hex[:8]}"
        try:
            self._run.write(name, b"")
            now = self._run.modified(name)
        finally:
            self._run.remove(name)
        return time.time() if now is None else now


def _touch(run: Storage, name: str) -> bool:
    """On a disk: renew a file's time, which also a full one allows; False if that cannot be."""
    if not isinstance(run, DiskStorage):
        return False
    try:
        os.utime(run.path / name)
    except FileNotFoundError:
        return False
    return True


def _living(owners: list[dict[str, Any]], ages: _Ages, cluster: str = "") -> dict[str, Any] | None:
    """Who of them lives, or may come back; asked from a Ray cluster or from outside."""
    for owner in owners:
        if owner.get("released"):
            continue
        if owner["host"] == socket.gethostname():
            is_running = _is_running(owner["pid"], owner["started"])
            is_alive = is_running or _may_come_back(owner, ages, cluster)
        else:
            is_alive = ages.is_fresh(owner["file"])
        if is_alive:
            return owner
    return None


def _may_come_back(owner: dict[str, Any], ages: _Ages, cluster: str) -> bool:
    """Whether a cluster lives that may restart this actor. On one's own cluster one knows: it has
    a name there."""
    host, _, port = owner.get("cluster", "").rpartition(":")
    if not owner.get("actor") or owner["cluster"] == cluster:
        return False
    if not ages.is_fresh(owner["file"]):
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_TIMEOUT_S).close()
    except (OSError, ValueError):  # nobody listens there, or it is no address
        return False
    return True


def _epochs(run: Storage) -> dict[int, list[str]]:
    """The files of the lease by their epoch."""
    found: dict[int, list[str]] = {}
    for name in run.files(FOLDER):
        number = name.rpartition("/")[2].partition("-")[0]
        if number.isdecimal():  # not the draft of one
            found.setdefault(int(number), []).append(name)
    return found


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
