"""The lease: staleness by the clock of the storage, unreadable files, renewal, a lost lease."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from memory_storage import MemoryStorage

from actors.storage.errors import LeaseLost, RunTaken
from actors.storage.lease import STALE_S, claim, owner_of
from actors.storage.storage import DiskStorage

ELSEWHERE = {"host": "elsewhere", "pid": 1, "started": 0.0, "cluster": "", "actor": "", "since": 5}


@pytest.mark.parametrize("clock", [0.0, 4e9])
def test_staleness_depends_only_on_the_storages_clock(clock: float) -> None:
    """The clock of the storage is decades behind or ahead of that of this process."""
    run: Any = MemoryStorage()
    run.now = clock
    run.write("lease/5-0", json.dumps({**ELSEWHERE, "renewed": 2e9 - clock}).encode())
    run.now += STALE_S - 1.0
    with pytest.raises(RunTaken, match="process 1 on elsewhere drives this run"):
        claim(run)
    run.now += 2.0
    lease = claim(run)
    assert lease.epoch == 6
    assert [name.partition("-")[0] for name in run.objects] == ["lease/6"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\x00" * 40,
        b"[]",
        b"null",
        b'{"host": 1}',
        b'{"pid": -1, "started": 0}',
        b"[" * 99999,
    ],
)
def test_unreadable_lease_holds_the_run_until_it_is_stale(tmp_path: Path, content: bytes) -> None:
    run = DiskStorage(tmp_path)
    run.write("lease/7-0", content)
    with pytest.raises(RunTaken) as refusal:
        claim(run)
    assert str(refusal.value) == (
        f"{tmp_path}/lease/7-0: the lease cannot be read, and was written within the last 15 s; "
        "if no process drives this run, try again in 15 s"
    )
    owner = owner_of(run)
    assert owner is not None and owner["host"] == "an unknown host"
    os.utime(tmp_path / "lease" / "7-0", (time.time() - 20.0,) * 2)
    assert owner_of(run) is None
    assert claim(run).epoch == 8


def test_renewal_on_disk_writes_no_data(tmp_path: Path) -> None:
    """A full disk must not cost the lease."""
    lease = claim(DiskStorage(tmp_path))
    [file] = (tmp_path / "lease").iterdir()
    number = file.stat().st_ino
    os.utime(file, (0.0, 0.0))
    lease.renew()
    assert file.stat().st_ino == number and time.time() - file.stat().st_mtime < 5.0
    file.unlink()
    lease.renew()
    assert json.loads(file.read_text())["host"] == socket.gethostname()


def test_lost_lease_writes_nothing_even_on_release() -> None:
    run: Any = MemoryStorage()
    first = claim(run, actor="a")
    second = claim(run, actor="a")
    before = dict(run.objects)
    for write in (first.renew, first.check_now, first.check):
        with pytest.raises(LeaseLost):
            write()
    first.release()
    assert run.objects == before
    second.release()
    assert owner_of(run) is None


class Refusing(MemoryStorage):
    """Counts its failed writes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_refused = 0

    def write(self, name: str, data: bytes) -> None:
        self.num_refused += self.refusal is not None
        super().write(name, data)


@pytest.mark.parametrize("refusal", [ValueError("broken answer"), OSError("away"), MemoryError()])
def test_renewal_continues_after_any_exception(refusal: Exception) -> None:
    run: Any = Refusing()
    lease = claim(run)
    [name] = run.times
    run.refusal, run.now = refusal, 7.0
    lease.start_renewing(every_s=0.01)
    deadline = time.monotonic() + 20.0
    while run.num_refused < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run.num_refused >= 1 and run.times[name] == 0.0
    run.refusal = None
    while run.times[name] != 7.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    lease.stop_renewing()
    assert run.times[name] == 7.0
