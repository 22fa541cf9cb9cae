"""The end of a private Ray cluster: no process and no session folder of it outlives its owner.

A guard process waits for the end of the owner, also by SIGKILL. Then it kills what is left of the
cluster and removes the folder. Whatever a killed guard leaves the next private cluster's removes.

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
"""For so long the session folder of a failed run is kept: Ray's log files are in it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Owner:
    """The process that started a private cluster, so that it can be told from a later one."""

    host: str
    boot: str
    namespace: str
    """Of process ids: another container's processes cannot be seen."""
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
        """False also where that cannot be known."""
        host, boot, namespace = _here()
        if host != self.host:
            return False
        if boot != self.boot:
            return True
        return namespace == self.namespace and _start_of(self.pid) != self.started


class Guard:
    """Ends the private cluster of this process; the guard process does the work."""

    def __init__(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # which the guard inherits
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
        self._tell(f"folder {session}")
        remove_dead_sessions(session.parent)

    def note_process(self, pid: int) -> None:
        """This process leads a session (as of `os.getsid`) of the cluster's processes."""
        self._tell(f"process {pid}")

    def keep_session(self) -> None:
        """The folder stays for a day, for its log files."""
        if self._session is not None:
            _write(self._session, replace(Owner.of(os.getpid()), kept_until=time.time() + KEPT_S))

    def close(self) -> None:
        """End the cluster; return when nothing of it is left."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=2 * END_TIMEOUT_S)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed: the next command's does its work
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def remove_dead_sessions(folder: Path) -> None:
    """Remove the session folders that a process of this project recorded itself in, if it is dead
    and no process of its cluster is left."""
    dead = [session for session in folder.glob("session_*") if _is_abandoned(session)]
    commands = [_command(pid) for pid in _pids()] if dead else []
    for session in dead:
        if not any(f"{session}/" in command for command in commands):
            _remove(session)


def ignore_signals() -> None:
    """Let SIGTERM and SIGHUP through to the children of this process, where they are blocked since
    it belongs to a private cluster; the process itself ignores them. Only for the main thread."""
    number = (signal.SIGTERM, signal.SIGHUP)
    if not set(number) <= signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return
    owner = os.getpid()

    def take(number: int, frame: object) -> None:
        if os.getpid() != owner:  # a forked child
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for each in number:
        signal.signal(each, take)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, number)


def guard(owner: int) -> None:
    """The guard's main: wait for the owner's end or its word, then end its cluster."""
    told, awaited = b"", [0]
    if os.getppid() == owner:
        awaited.append(os.pidfd_open(owner))  # a forked child of the owner may hold the pipe, too
    while 0 in select.select(awaited, [], [])[0]:
        block = os.read(0, 1 << 16)
        if not block:
            break
        told += block
    notes = [line.split(" ", 1) for line in told.decode().splitlines()]
    end_processes({int(text) for kind, text in notes if kind == "process"})
    for session in [Path(text) for kind, text in notes if kind == "folder"]:
        record = _read(session)
        if record is not None and record.pid == owner and time.time() >= record.kept_until:
            _remove(session)


def end_processes(sessions: Collection[int]) -> None:
    """SIGKILL every process of these sessions (ids as of `os.getsid`), and wait for their end."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left := list(_members(sessions))) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _members(sessions: Collection[int]) -> Iterator[int]:
    """Without zombies."""
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
    """Empty if there is no such process."""
    found = _stat(pid)
    return found[19] if found else ""


def _stat(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` from the state on; none if there is no such process."""
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
    """Another command may remove the same one."""
    latest = session.parent / LATEST
    with suppress(OSError):
        if latest.is_symlink() and latest.readlink().name == session.name:
            latest.unlink()
    shutil.rmtree(session, ignore_errors=True)


def _read(session: Path) -> Owner | None:
    """None if no process of this project has recorded itself there."""
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
