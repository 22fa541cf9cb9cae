"""Cleanup after a private Ray cluster; ordinary processes take the place of those of Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from actors.ray_backend.cluster.sessions import OWNER, Guard, remove_dead_sessions

OWNING = """
import subprocess, sys, time
from pathlib import Path
from actors.ray_backend.cluster.sessions import Guard

session = Path(sys.argv[1], f"session_x_{__import__('os').getpid()}")
session.mkdir()
guard = Guard()
guard.note_session(session)
process = subprocess.Popen(["sh", "-c", "sleep 99 & wait"], start_new_session=True)
guard.note_process(process.pid)
while len(children := __import__("psutil").Process(process.pid).children()) < 1:
    time.sleep(0.05)
print(process.pid, children[0].pid, guard._process.pid, flush=True)
time.sleep(99)
"""


def wait_for(condition: Callable[[], object], purpose: str) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {purpose}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_owner(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a process that owns a cluster of two processes; the pids of these and of its guard."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNING, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    return owner, [int(word) for word in owner.stdout.readline().split()]


def kill_owner(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.wait()
    assert owner.stdout is not None
    owner.stdout.close()


def test_killed_owner_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    owner, pids = start_owner(tmp_path)
    for pid in pids[2:]:  # the guard ignores a signal to its whole control group
        os.kill(pid, signal.SIGTERM)
    kill_owner(owner)
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "the end of all processes")
    assert not list(tmp_path.iterdir())


def test_next_command_removes_what_a_killed_guard_left(tmp_path: Path) -> None:
    owner, pids = start_owner(tmp_path)
    os.kill(pids[2], signal.SIGKILL)
    kill_owner(owner)
    [session] = tmp_path.iterdir()
    remove_dead_sessions(tmp_path)
    assert not session.exists()
    os.killpg(pids[0], signal.SIGKILL)


def test_only_folders_of_provably_dead_owners_are_removed(tmp_path: Path) -> None:
    owner, _ = start_owner(tmp_path)
    [live_session] = tmp_path.iterdir()
    record = json.loads((live_session / OWNER).read_text())
    others = {
        "without_owner": None,
        "elsewhere": {**record, "host": "another", "pid": 1, "started": "7"},
        "unseen": {**record, "namespace": "pid:[1]", "pid": 1, "started": "7"},
        "kept": {**record, "started": "7", "kept_until": time.time() + 60.0},
        "garbage": [1],
        "reused": {**record, "started": "7"},
    }
    for name, owner_record in others.items():
        folder = tmp_path / f"session_{name}"
        folder.mkdir()
        if owner_record is not None:
            (folder / OWNER).write_text(json.dumps(owner_record))
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_reused")
    remove_dead_sessions(tmp_path)
    remaining = {path.name.removeprefix("session_") for path in tmp_path.iterdir()}
    assert remaining == {*others, live_session.name.removeprefix("session_")} - {"reused"}
    kill_owner(owner)


def test_closed_guard_ends_the_cluster(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    guard = Guard()
    session = tmp_path / f"session_x_{os.getpid()}"
    session.mkdir()
    guard.note_session(session)
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True
    )
    guard.note_process(process.pid)
    guard.keep_session()
    guard.close()
    assert process.wait(timeout=10.0) == -signal.SIGKILL
    assert session.exists(), "kept for its log files"
    assert capfd.readouterr() == ("", "")
