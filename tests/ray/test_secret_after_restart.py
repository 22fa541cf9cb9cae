"""A controller that Ray restarts knows the secret of the snapshot servers that have outlived it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command_line import elastic_train

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_a_snapshot_is_read_after_the_controllers_restart(tmp_path: Path) -> None:
    """The worker that takes the lost one's place is started, and told the secret, by the restarted
    controller; the snapshot is in a server that the first one started."""
    with elastic_train(
        tmp_path, "tiny", "--data", "random", "--workers", "2:2", "--layout", "fsdp=2",
        "--steps", "1500",
    ) as command:  # fmt: skip
        command.wait_until(lambda: command.lines("KeeperReady"), "the snapshot server")
        command.wait_for_step(30)
        command.kill_controller()
        command.wait_until(lambda: command.lines("ControllerRestarted"), "the controller's return")
        step = len(command.metrics())
        command.wait_for_step(step + 20)
        os.kill(command.pid_of("w0"), signal.SIGKILL)
        command.wait_until(lambda: len(command.lines("Resume")) >= 2, "the recovery")
        sources = [line["source"] for line in command.lines("Relaid")]
        num_servers = len(command.lines("StartKeeper"))
        command.process.send_signal(signal.SIGINT)
        code, output = command.finish()
        files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert code == 130, output
    assert sources == ["initial", "snapshot"] and num_servers == 1
    assert not [file for file in files if b"secret" in file.read_bytes()]
