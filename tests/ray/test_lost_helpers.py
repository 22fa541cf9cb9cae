"""SIGKILL of Ray's GCS and of observers; standby snapshot servers."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from command_line import Command, assert_no_process_left, elastic_train, processes_of
from mlflow import MlflowClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MAX_START_S = 2.0
TINY = ("tiny", "--data", "random", "--workers", "2")


def processes_of_run(command: Command, word: str) -> list[psutil.Process]:
    """The run's processes with this word in their name or command line."""
    found = []
    for process in processes_of(command.ray_folder):
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            if word in " ".join((process.name(), *process.cmdline())):
                found.append(process)
    return found


@pytest.mark.soak
def test_killed_gcs_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    with elastic_train(tmp_path, *TINY, "--steps", "100000") as command:
        command.wait_for_step(10)
        command.wait_until(partial(processes_of_run, command, "RayObserver"), "an observer")
        [gcs] = [p for p in processes_of(command.ray_folder) if p.name() == "gcs_server"]
        gcs.kill()
        began = time.monotonic()
        code, output = command.finish()
        print(f"the command ended {time.monotonic() - began:.1f} s after the SIGKILL")
        assert_no_process_left(command.ray_folder, patience_s=2.0)
        [stopped] = command.lines("Stopped")
        assert command.lines("Checkpointed")[-1]["step"] == stopped["step"] >= 10
    assert code == 1, output
    [line, *others] = [line for line in output.splitlines() if line.startswith("elastic: ")]
    assert "the GCS at" in line and "is gone" in line
    assert f"saved at step {stopped['step']} in {tmp_path}/run: repeat the command" in line
    assert all("observer did not answer" in other for other in others), (
        "the observer was still starting"
    )
    assert "rpc_client" not in output, "the message with which Ray itself ends after a minute"


@pytest.mark.soak
def test_killed_observers_are_replaced_and_deliver_all_metrics(tmp_path: Path) -> None:
    with elastic_train(tmp_path, *TINY, "--steps", "600") as command:
        observers = partial(processes_of_run, command, "RayObserver")
        command.wait_until(observers, "an observer")
        [first] = observers()
        first.kill()
        command.wait_until(
            lambda: [process for process in observers() if process.pid != first.pid],
            "another observer",
        )
        for second in observers():
            second.suspend()  # so that it cannot deliver the end before it is killed
        while not command.lines("Stopped"):
            time.sleep(0.05)
        second.kill()
        code, output = command.finish()
        metrics = command.metrics()
    assert code == 0, output
    assert "MLflow" not in output.splitlines()[-1], output
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    [run] = client.search_runs(["1"])
    assert run.info.status == "FINISHED"
    delivered = client.get_metric_history(run.info.run_id, "loss")
    assert {point.step: point.value for point in delivered} == pytest.approx(
        {line["step"]: line["loss"] for line in metrics}
    )


@pytest.mark.soak
def test_standby_snapshot_server_starts_before_the_first_loss(tmp_path: Path) -> None:
    """Two replicas need no snapshots; a single one does."""
    with elastic_train(tmp_path, *TINY, "--steps", "100000") as command:
        command.wait_for_step(1)
        servers = processes_of_run(command, "SnapshotServer")
        assert len(servers) == 1 and not command.lines("StartSnapshotServer")
        os.kill(command.pid_of("w0"), signal.SIGKILL)
        command.wait_until(lambda: command.lines("StartSnapshots"), "snapshots")
        [lost] = command.lines("WorkerLost")
        [order, *_] = command.lines("StartSnapshots")
        latency_s = order["time"] - lost["time"]
        print(f"snapshots started {latency_s:.2f} s after the loss")
        assert latency_s < MAX_START_S, "a server without a warm start takes 7 to 17 s"
        assert processes_of_run(command, "SnapshotServer") == servers
        command.process.send_signal(signal.SIGINT)
        assert command.finish()[0] == 130
