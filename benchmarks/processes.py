"""Programs that a benchmark starts, identified by a mark in their environment and ended by pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "ELASTIC_BENCHMARK"
EQUAL = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", "PYTHONUNBUFFERED": "1"}
"""One thread and equal priority for every process: Ray would run its workers at nice 15."""
POLL_S = 0.02
GRACE_S = 20.0


class Failed(Exception):
    """A measured program ended, or did not meet a condition in time."""


@dataclass(frozen=True)
class Program:
    """A running program, all its descendants, and the file with its output."""

    name: str
    process: subprocess.Popen[bytes]
    mark: str
    log: Path

    def family(self) -> list[psutil.Process]:
        """Every live process that inherited the mark, even outside of the process tree."""
        return [process for process in psutil.process_iter() if _mark_of(process) == self.mark]

    def freeze(self) -> list[psutil.Process]:
        """Stop (SIGSTOP) the family; return it for `thaw`."""
        family = self.family()
        for process in family:
            _send(process, signal.SIGSTOP)
        return family

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, awaited: str) -> None:
        """Raises `Failed`, with the end of the log, on timeout or if the program ends."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                raise Failed(f"{self.name} ended before {awaited}\n{self.tail()}")
            if time.monotonic() > deadline:
                raise Failed(f"{self.name}: {awaited} took over {timeout_s:.0f} s\n{self.tail()}")
            time.sleep(POLL_S)

    def tail(self, num_lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def end(self) -> None:
        """Terminate it, frozen or not, and kill what is left after `GRACE_S`."""
        thaw(self.family())
        if self.process.poll() is None:
            self.process.terminate()
            deadline = time.monotonic() + GRACE_S
            while self.process.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
        while remaining := self.family():
            for process in remaining:
                _send(process, signal.SIGKILL)
            psutil.wait_procs(remaining, timeout=5.0)
        self.process.wait()


@contextmanager
def running(
    name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """Run a program in `folder`; none of its processes is left when the block ends."""
    mark = f"{name}-{uuid.uuid4().hex}"
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **EQUAL, **(environment or {}), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    program = Program(name, process, mark, log)
    try:
        yield program
    finally:
        program.end()


def python(script: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(script), *arguments]


def thaw(family: Sequence[psutil.Process]) -> float:
    """Continue frozen processes; return the time, in seconds since the epoch."""
    for process in family:
        _send(process, signal.SIGCONT)
    return time.time()


def kill(pid: int) -> float:
    """SIGKILL a process; return the time, in seconds since the epoch."""
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    return killed


def _mark_of(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.environ().get(MARK)
    except psutil.Error:
        return None  # it has ended meanwhile, or belongs to another user


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it has ended meanwhile
