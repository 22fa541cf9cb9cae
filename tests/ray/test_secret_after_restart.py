"""A controller that Ray restarts has the secret of the snapshot servers that survived."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import elastic_train

from actors.runtime.handshake import SECRET_BYTES

WRITE_SECRETS = """
import os, secrets, sys

def write_token(num_bytes, draw=secrets.token_bytes):
    token = draw(num_bytes)
    if sys._getframe(1).f_code.co_name == "new_secret":
        with open(os.environ["SECRETS_FILE"], "a") as file:
            file.write(token.hex() + "\\n")
    return token

if "train" in sys.orig_argv and "pipelines" in sys.orig_argv:
    secrets.token_bytes = write_token
"""
"""A module that Python imports at its start; it writes the command's secrets to a file."""

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.mark.soak
def test_snapshot_is_read_after_a_restart_of_the_controller(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restarted controller starts the replacement of a lost worker and gives it the secret. The
    snapshot is in a server that the first controller started. No file of the run or of Ray contains
    the secret."""
    module_folder = tmp_path_factory.mktemp("module")
    (module_folder / "sitecustomize.py").write_text(WRITE_SECRETS)
    monkeypatch.setenv("PYTHONPATH", str(module_folder))
    monkeypatch.setenv("SECRETS_FILE", str(module_folder / "secrets"))
    with elastic_train(
        tmp_path, "tiny", "--data", "random", "--workers", "2:2", "--layout", "fsdp=2",
        "--steps", "1500",
    ) as command:  # fmt: skip
        command.wait_until(lambda: command.lines("SnapshotServerReady"), "the snapshot server")
        command.wait_for_step(30)
        command.kill_controller()
        command.wait_until(
            lambda: command.lines("ControllerRestarted"), "the restart of the controller"
        )
        step = len(command.metrics())
        command.wait_for_step(step + 20)
        os.kill(command.pid_of("w0"), signal.SIGKILL)
        command.wait_until(lambda: len(command.lines("Resume")) >= 2, "the recovery")
        sources = [line["source"] for line in command.lines("Resharded")]
        num_servers = len(command.lines("StartSnapshotServer"))
        command.process.send_signal(signal.SIGINT)
        code, output = command.finish()
        lines = (module_folder / "secrets").read_text().splitlines()
        secrets = [bytes.fromhex(line) for line in lines]
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        logs = [file for file in Path(command.ray_folder).rglob("*") if file.is_file()]
        leaks = [file for file in (*files, *logs) if contains_any(file, secrets)]
    assert code == 130, output
    assert sources == ["initial", "snapshot"] and num_servers == 1
    assert (tmp_path / "run" / "journal.jsonl") in files and not leaks
    assert {len(secret) for secret in secrets} == {SECRET_BYTES}
    assert not any(secret.hex() in output for secret in secrets)


def contains_any(file: Path, secrets: Sequence[bytes]) -> bool:
    content = file.read_bytes()
    lower = content.lower()
    return any(secret in content or secret.hex().encode() in lower for secret in secrets)
