"""The run's lease: one process at a time may drive a run, fenced by an epoch.

The owner checks the lease before every write that others rely on. A claimant writes a file of the
next epoch and lists the files again: if another process claims as well, it withdraws. So of two
simultaneous claimants at most one stays, on any storage with consistent listing (a disk, S3). The
owner renews its file. The lease is stale when the owner is known to be dead, or has not renewed it
for `STALE_S`. An actor that Ray has restarted inherits the lease of its own dead process without
waiting.

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
    """The right to write a run's journal and manifests, until another process takes a new epoch."""

    def __init__(
        self, run: Storage, epoch: int, name: str, owner: dict[str, Any], since: int
    ) -> None:
        self._run = run
        self._name = name
        self._owner = owner
        self._is_lost = False
        self._stop_renewing = threading.Event()
        self._writing = threading.Lock()
        self.epoch = epoch
        self.since = since
        """Since this epoch only this actor, in this or an earlier process, has driven the run."""

    def check(self) -> None:
        """Raises `LeaseLost` once another controller has claimed the run.

        On an object store, where looking takes time, this is as of the last renewal.
        """
        if isinstance(self._run, DiskStorage):
            self.check_now()
        elif self._is_lost:
            raise self._lost()

    def check_now(self) -> None:
        """List the claims now. Raises `LeaseLost` if another controller has claimed the run, or
        `OSError`."""
        self._is_lost = self._is_lost or max(_epochs(self._run), default=0) > self.epoch
        if self._is_lost:
            raise self._lost()

    def renew(self) -> None:
        """Show that the owner is alive. Raises `LeaseLost`, or `OSError`."""
        self.check_now()
        with self._writing:
            if not self._stop_renewing.is_set() and not _touch(self._run, self._name):
                self._write(**self._owner)

    def start_renewing(self, every_s: float = RENEW_EVERY_S) -> None:
        """Renew the lease from now on, in its own thread: storage may be slow, or fail."""
        renew_forever = partial(self._renew_forever, every_s)
        threading.Thread(target=renew_forever, name="lease", daemon=True).start()

    def stop_renewing(self) -> None:
        """Stop renewing the lease."""
        self._stop_renewing.set()

    def _renew_forever(self, every_s: float) -> None:
        while not self._stop_renewing.wait(every_s):
            try:
                self.renew()
            except LeaseLost:
                return  # writers learn it from `check`
            except Exception:  # not only OSError: without this thread, a live run would be taken
                continue  # tried again; if the failure lasts, the lease expires

    def release(self) -> None:
        """Mark the run as free, so that the next claimant need not wait. Writes nothing if the
        lease is lost."""
        self.stop_renewing()
        with self._writing, suppress(LeaseLost):
            self.check_now()
            self._write(**self._owner, released=True)

    def withdraw(self) -> None:
        self._run.remove(self._name)

    def _write(self, **owner: object) -> None:
        self._run.write(self._name, json.dumps(owner).encode())

    def _lost(self) -> LeaseLost:
        return LeaseLost(f"{self._run.url}: the lease of epoch {self.epoch} was taken over")


def claim(
    run: Storage,
    cluster: str = "",
    actor: str = "",
    stale_s: float = STALE_S,
    newer_than: int = 0,
) -> Lease:
    """Claim the run. Raises `RunTaken` if another process drives it.

    `cluster` is the address of the claimant's Ray cluster, by which others find it. `actor` stays
    the same over an actor's restarts. A lease that was not renewed for `stale_s` has no owner. The
    epoch is also newer than `newer_than`: files of older epochs may have been removed.
    """
    older = _epochs(run)  # listed once: no claim slips in between the check and this claim
    newest = _newest_owners(run, older)
    inherited = [owner for owner in newest if actor and owner.get("actor") == actor]
    owner = None if inherited else _live_owner(newest, _LeaseAges(run, stale_s), cluster)
    if owner and owner.get("is_damaged"):
        raise RunTaken(
            f"{run.at(owner['file']).url}: the lease cannot be read, and was written within the "
            f"last {stale_s:g} s; if no process drives this run, try again in {stale_s:g} s"
        )
    if owner:
        raise RunTaken(
            f"{run.url}: process {owner.get('pid')} on {owner.get('host')} drives this run; "
            "stop that process, or choose another --run-name"
        )
    epoch = max([newer_than, *older]) + 1
    name = f"{FOLDER}/{epoch}-{uuid.uuid4().hex[:8]}"
    since = inherited[0]["since"] if inherited else epoch
    claimant = {**_this_process(), "cluster": cluster, "actor": actor, "since": since}
    lease = Lease(run, epoch, name, claimant, since)
    lease.renew()
    if sum(len(names) for other, names in _epochs(run).items() if other >= epoch) > 1:
        lease.withdraw()
        raise RunTaken(f"{run.url}: another process has just claimed this run")
    for names in older.values():
        for old in names:
            run.remove(old)
    return lease


def damaged_leases(run: Storage) -> list[str]:
    """The lease files of the newest epoch that cannot be read."""
    newest = _newest_owners(run, _epochs(run))
    return [owner["file"] for owner in newest if owner.get("is_damaged")]


def owner_of(run: Storage) -> dict[str, Any] | None:
    """The process that drives the run now, as its lease file describes it; None if there is none.

    Writes nothing, so the reader's clock stands in for the storage's.
    """
    newest = _newest_owners(run, _epochs(run))
    return _live_owner(newest, _LeaseAges(run, STALE_S, may_write=False))


def _newest_owners(run: Storage, epochs: dict[int, list[str]]) -> list[dict[str, Any]]:
    """The contents of the lease files of the newest epoch."""
    owners: list[dict[str, Any]] = []
    for name in epochs[max(epochs)] if epochs else ():
        with suppress(FileNotFoundError):  # withdrawn meanwhile
            owners.append({**_read_owner(run.read(name)), "file": name})
    return owners


def _read_owner(content: bytes) -> dict[str, Any]:
    """Parse a lease file; one that cannot be read belongs to an unknown owner."""
    try:
        fields = json.loads(content)
        pid = int(fields["pid"])
        if not 0 < pid < 2**31:
            raise ValueError(f"pid {pid}")
        texts = {key: str(fields.get(key, "")) for key in ("host", "cluster", "actor")}
        return {
            **texts,
            "pid": pid,
            "started": float(fields["started"]),
            "since": int(fields.get("since", 0)),
            "released": fields.get("released") is True,
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {"is_damaged": True, "host": "an unknown host", "pid": "?", "cluster": ""}


class _LeaseAges:
    """Whether lease files are fresh by the storage's clock, which is read only if needed."""

    def __init__(self, run: Storage, stale_s: float, may_write: bool = True) -> None:
        self._run = run
        self._stale_s = stale_s
        self._may_write = may_write

    def is_fresh(self, name: str) -> bool:
        """If the storage reports no modification times, every existing file counts as fresh."""
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
    """On a disk, update a file's time, which works even if the disk is full; False if it cannot."""
    if not isinstance(run, DiskStorage):
        return False
    try:
        os.utime(run.path / name)
    except FileNotFoundError:
        return False
    return True


def _live_owner(
    owners: list[dict[str, Any]], ages: _LeaseAges, cluster: str = ""
) -> dict[str, Any] | None:
    """The first owner that is alive, or may be restarted. `cluster` is the caller's Ray cluster, or
    empty."""
    for owner in owners:
        if owner.get("released"):
            continue
        if owner["host"] == socket.gethostname():
            is_running = _is_running(owner["pid"], owner["started"])
            is_alive = is_running or _may_restart(owner, ages, cluster)
        else:
            is_alive = ages.is_fresh(owner["file"])
        if is_alive:
            return owner
    return None


def _may_restart(owner: dict[str, Any], ages: _LeaseAges, cluster: str) -> bool:
    """Whether another cluster is alive that may restart this actor. On the caller's own cluster the
    actor's name already answers that."""
    host, _, port = owner.get("cluster", "").rpartition(":")
    if not owner.get("actor") or owner["cluster"] == cluster:
        return False
    if not ages.is_fresh(owner["file"]):
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_TIMEOUT_S).close()
    except (OSError, ValueError):  # no process listens there, or it is not an address
        return False
    return True


def _epochs(run: Storage) -> dict[int, list[str]]:
    """The files of the lease by epoch."""
    names_by_epoch: dict[int, list[str]] = {}
    for name in run.files(FOLDER):
        number = name.rpartition("/")[2].partition("-")[0]
        if number.isdecimal():  # not the draft of a lease file
            names_by_epoch.setdefault(int(number), []).append(name)
    return names_by_epoch


def _this_process() -> dict[str, object]:
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
