"""Signals to a process group or cgroup, and cleanup after private clusters."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from command_line import (
    Command,
    assert_no_process_left,
    elastic_train,
    processes_of,
    ray_folder,
    start,
)
from mlflow import MlflowClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TINY = ("tiny", "--data", "random", "--workers", "2")


def signal_group(command: Command, number: signal.Signals) -> None:
    """Signal the process, then its whole group, as `timeout` does."""
    command.process.send_signal(number)
    os.killpg(command.process.pid, number)


def signal_all(command: Command, number: signal.Signals) -> None:
    """Signal every process of the cgroup, as systemd and Slurm do."""
    for process in processes_of(command.ray_folder):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("send", "number", "exit_code"),
    [
        (signal_group, signal.SIGTERM, 143),
        pytest.param(signal_all, signal.SIGHUP, 129, marks=pytest.mark.soak),
    ],
)
def test_signal_to_all_processes_saves_a_checkpoint(
    tmp_path: Path,
    send: Callable[[Command, signal.Signals], None],
    number: signal.Signals,
    exit_code: int,
) -> None:
    with elastic_train(tmp_path, *TINY, "--steps", "100000") as command:
        command.wait_for_step(10)
        send(command, number)
        code, output = command.finish()
        assert code == exit_code, output
        [stopped] = command.lines("Stopped")
        assert (stopped["outcome"], stopped["reason"]) == (
            "interrupted",
            f"{number.name} at the driver",
        )
        assert command.lines("Checkpointed")[-1]["step"] == stopped["step"]
        assert not command.lines("WorkerLost") and not command.lines("ControllerRestarted")
        assert_no_process_left(command.ray_folder)
        assert session_folders(command.ray_folder) == []


@pytest.mark.soak
def test_two_commands_on_one_machine_both_complete(tmp_path: Path) -> None:
    """Each command has a private cluster; both share the MLflow database. They also remove the
    session folder of a killed command."""

    def start_train(folder: str, run_name: str, steps: str) -> Command:
        options = ("--run-name", run_name, "--steps", steps)
        return start("train", tmp_path, folder, "", *TINY, *options, run_name=run_name)

    with ray_folder() as folder:
        killed = start_train(folder, "killed", "100000")
        killed.wait_until(lambda: killed.lines("RunOpened"), "its start")
        abandoned = session_folders(folder)
        in_use = shared_memory_of(folder)
        assert any("plasma" in name for name in in_use), "the object store of Ray is in use"
        killed.process.kill()
        killed.process.communicate()  # its guard ends the other processes
        assert_no_process_left(folder)
        assert not [name for name in in_use if Path(name).exists()]
        first = start_train(folder, "first", "100")
        first.wait_for_step(1)
        second = start_train(folder, "second", "300")
        for command in (first, second):
            code, output = command.finish()
            assert code == 0, output
        assert len(second.metrics()) == 300
        assert_no_process_left(folder)
        assert session_folders(folder) == [], f"{abandoned} was the session of the killed command"
    runs = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["1"])
    states = {run.info.run_name: run.info.status for run in runs}
    assert states["first"] == states["second"] == "FINISHED"


def shared_memory_of(ray_folder: str) -> set[str]:
    """The files in /dev/shm that the cluster's processes have mapped or open: shared memory and
    named semaphores. The names of unlinked ones end in "(deleted)"."""
    names: set[str] = set()
    for process in processes_of(ray_folder):
        with suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            names.update(line.split(None, 5)[5] for line in lines if "/dev/shm/" in line)
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    names.add(str(link.readlink()))
    return {name for name in names if name.startswith("/dev/shm/")}


def session_folders(ray_folder: str) -> list[str]:
    """The session folders of a cluster, including links to them."""
    return sorted(path.name for path in Path(ray_folder, "ray").glob("session_*"))
