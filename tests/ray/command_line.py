"""The `elastic` command as a user runs it: a process, with its own Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import psutil
from ray._common.utils import get_default_ray_temp_dir

PATIENCE_S = 300.0
ROOT = Path(__file__).parents[2]


@dataclass
class Command:
    """A running `elastic` command."""

    process: subprocess.Popen[str]
    folder: Path
    ray_folder: str
    address: str
    """The address of the cluster; "local" is a private one."""

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The journal's lines of one event or command, so far."""
        return [
            line
            for line in read_lines(self.folder / "journal.jsonl")
            if kind in (line.get("event"), line.get("command"))
        ]

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")

    def controller_pid(self) -> int | None:
        """The controller's process id, from the lease, which each new controller claims."""
        epochs = {int(f.name.partition("-")[0]): f for f in (self.folder / "lease").glob("*-*")}
        try:
            return json.loads(epochs[max(epochs)].read_text())["pid"] if epochs else None
        except FileNotFoundError:
            return None  # a new controller is writing it now

    def kill_controller(self) -> float:
        """Kill the controller by SIGKILL; return the time."""
        pid = self.controller_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return time.time()

    def pid_of(self, worker: str) -> int:
        return next(line["pid"] for line in self.lines("WorkerReady") if line["worker"] == worker)

    def wait_until(self, condition: Callable[[], object], awaited: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"ended before {awaited}:\n{self.output()}"
            assert time.monotonic() < deadline, f"waited too long for {awaited}"
            time.sleep(0.2)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(self.metrics()) >= step, f"step {step}")

    def output(self) -> str:
        """Wait for the end of the command; return what it printed."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return out + err

    def finish(self) -> tuple[int, str]:
        output = self.output()
        return self.process.returncode, output


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that a process is still writing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@contextmanager
def ray_folder() -> Iterator[str]:
    """A folder for a cluster's files; at the end no file and no process of the cluster is left."""
    folder = mkdtemp(prefix="ray-", dir="/tmp")  # socket paths must be short
    Path(get_default_ray_temp_dir()).mkdir(exist_ok=True)  # Ray records the newest address there
    try:
        yield folder
    finally:
        remaining = processes_of(folder)
        for process in remaining:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        # A process that still writes would recreate its file.
        psutil.wait_procs(remaining, PATIENCE_S)
        rmtree(folder)


def processes_of(ray_folder: str) -> list[psutil.Process]:
    """Find every process that was started, directly or not, for the cluster of this test."""
    processes = []
    for process in psutil.process_iter():
        try:
            is_of_cluster = process.environ().get("RAY_TMPDIR") == ray_folder
            is_of_cluster = is_of_cluster or any(ray_folder in word for word in process.cmdline())
            if is_of_cluster and process.status() != "zombie":
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return processes


def elastic(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run another `elastic` command, as in another terminal: without the test cluster's address."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RAY_ADDRESS", "RAY_TMPDIR")
    }
    return subprocess.run(
        [sys.executable, "-m", "pipelines", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**inherited, **environment},
        cwd=ROOT,
    )


@contextmanager
def elastic_train(storage: Path, *arguments: str) -> Iterator[Command]:
    """Start `elastic train ARGUMENTS` with run name `run`; at the end, assert that no process is
    left."""
    with on_own_cluster("train", storage, *arguments, "--run-name", "run") as command:
        yield command


@contextmanager
def on_own_cluster(name: str, storage: Path, *arguments: str) -> Iterator[Command]:
    """Start a command on a private cluster; at the end, assert that no process is left."""
    with ray_folder() as folder:
        command = start(name, storage, folder, "local", *arguments)
        try:
            yield command
        finally:
            if command.process.poll() is None:
                command.process.send_signal(signal.SIGKILL)
            command.process.communicate()
            assert_no_process_left(folder)


def start(
    name: str,
    storage: Path,
    ray_folder: str,
    address: str,
    *arguments: str,
    run_name: str = "run",
) -> Command:
    """Start a command on the cluster at an address, as the leader of a process group. With an empty
    address the command looks for a cluster itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines", name, *arguments, "--storage", str(storage)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": address, "RAY_TMPDIR": ray_folder},
        cwd=ROOT,
        start_new_session=True,
    )
    return Command(process, storage / run_name, ray_folder, address)


def assert_no_process_left(ray_folder: str, patience_s: float = 20.0) -> None:
    """Invariant 12: no process of the run or its cluster outlives it."""
    deadline = time.monotonic() + patience_s
    while (remaining := processes_of(ray_folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not remaining, f"left behind: {[process.name() for process in remaining]}"
