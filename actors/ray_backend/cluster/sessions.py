"""Cleanup of private Ray clusters: no process or session folder of one outlives its owner.

A guard process waits for the end of the owner, even by SIGKILL. Then it kills what is left of the
cluster and removes the session folder. If a guard is killed, the next private cluster's guard
removes what it left.

This file is also the guard's program. It imports the standard library only, to start fast.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

OWNER = "elastic-owner.json"
LATEST = "session_latest"
END_TIMEOUT_S = 20.0
KEPT_S = 86400.0
"""How long the session folder of a failed run stays: Ray's log files are in it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Owner:
    """The process that started a private cluster, distinguishable from a later one of its pid."""

    host: str
    boot: str
    namespace: str
    """The namespace of process ids: another container's processes are invisible."""
    pid: int
    started: str
    """In clock ticks after the boot."""
    kept_until: float = 0.0
    """Seconds since the epoch."""

    @classmethod
    def of(cls, pid: int) -> Owner:
        return cls(*_here(), pid, _start_of(pid))

    @property
    def is_dead(self) -> bool:
        """Whether the process is dead; False if this host cannot know."""
        host, boot, namespace = _here()
        if host != self.host:
            return False
        if boot != self.boot:
            return True
        return namespace == self.namespace and _start_of(self.pid) != self.started


class Guard:
    """Starts and informs the guard process, which ends this process's private cluster."""

    def __init__(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the guard inherits the mask
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._session: Path | None = None

    def note_session(self, session: Path) -> None:
        """Record this process as the owner of a session folder; remove those of dead owners."""
        self._session = session
        _write(session, Owner.of(os.getpid()))
        self._send_to_guard(f"folder {session}")
        remove_dead_sessions(session.parent)

    def note_process(self, pid: int) -> None:
        """Note a process that leads a session (see `os.getsid`) of the cluster."""
        self._send_to_guard(f"process {pid}")

    def keep_session(self) -> None:
        """Keep the session folder for a day, for its log files."""
        if self._session is not None:
            _write(self._session, replace(Owner.of(os.getpid()), kept_until=time.time() + KEPT_S))

    def close(self) -> None:
        """End the cluster; return when nothing is left of it."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=2 * END_TIMEOUT_S)

    def _send_to_guard(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed: the next command's guard does its work
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def remove_dead_sessions(folder: Path) -> None:
    """Remove the session folders whose recorded owner is dead, if no process of the cluster is
    left. Folders without a record of this project stay."""
    dead = [session for session in folder.glob("session_*") if _is_abandoned(session)]
    commands = [_command(pid) for pid in _pids()] if dead else []
    for session in dead:
        if not any(f"{session}/" in command for command in commands):
            _remove(session)


def ignore_signals() -> None:
    """If this process blocks SIGTERM and SIGHUP as part of a private cluster, unblock them for its
    children; the process itself ignores them. Call this on the main thread only."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    if not set(numbers) <= signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return
    owner = os.getpid()

    def handle(number: int, frame: object) -> None:
        if os.getpid() != owner:  # a forked child
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in numbers:
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def guard(owner: int) -> None:
    """The guard's main function: wait for the end of the owner or of its pipe, then end its
    cluster."""
    received, awaited = b"", [0]
    if os.getppid() == owner:
        awaited.append(os.pidfd_open(owner))  # a forked child of the owner may hold the pipe, too
    while 0 in select.select(awaited, [], [])[0]:
        block = os.read(0, 1 << 16)
        if not block:
            break
        received += block
    notes = [line.split(" ", 1) for line in received.decode().splitlines()]
    end_processes({int(text) for kind, text in notes if kind == "process"})
    for session in [Path(text) for kind, text in notes if kind == "folder"]:
        record = _read(session)
        if record is not None and record.pid == owner and time.time() >= record.kept_until:
            _remove(session)


def end_processes(sessions: Collection[int]) -> None:
    """Kill every process of these sessions (ids as of `os.getsid`), and wait for their end."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left := list(_members(sessions))) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _members(sessions: Collection[int]) -> Iterator[int]:
    """The processes of these sessions, without zombies."""
    for pid in _pids() if sessions else ():
        state, _, _, session, *_ = _stat(pid) or ("Z", "", "", "0")
        if state not in "ZX" and int(session) in sessions:
            yield pid


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _is_abandoned(session: Path) -> bool:
    owner = None if session.is_symlink() else _read(session)
    return owner is not None and owner.is_dead and time.time() >= owner.kept_until


def _here() -> tuple[str, str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot, str(Path("/proc/self/ns/pid").readlink())


def _start_of(pid: int) -> str:
    """The start time of a process; empty if there is no such process."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat`, beginning with the state; none if there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _remove(session: Path) -> None:
    """Remove a session folder; another command may do so at the same time."""
    latest = session.parent / LATEST
    with suppress(OSError):
        if latest.is_symlink() and latest.readlink().name == session.name:
            latest.unlink()
    shutil.rmtree(session, ignore_errors=True)


def _read(session: Path) -> Owner | None:
    """The recorded owner of a session folder; None if this project recorded none."""
    try:
        return Owner(**json.loads((session / OWNER).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(session: Path, owner: Owner) -> None:
    draft = session / f".{OWNER}"
    draft.write_text(json.dumps(asdict(owner)))
    draft.replace(session / OWNER)


if __name__ == "__main__":
    guard(int(sys.argv[1]))
