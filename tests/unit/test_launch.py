"""Commands that join or start a Ray cluster: refusals, private clusters, tokens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from actors.ray_backend.cluster.ray_private import recorded_address
from actors.ray_backend.driver import (
    is_private,
    join_cluster,
    join_existing_cluster,
    join_or_start_cluster,
)
from pipelines.cli import main


@pytest.fixture
def silent_address() -> str:
    """An address without a listener: the port was just closed."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{closed.getsockname()[1]}"


def test_silent_address_is_refused_at_once_and_no_cluster_starts(silent_address: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        join_or_start_cluster(silent_address, 1, use_gpus=False, namespace="elastic")
    with pytest.raises(ConnectionRefusedError):
        join_cluster(silent_address, "elastic")
    assert time.monotonic() - started < 5.0, "Ray itself would try for a minute"
    assert not ray.is_initialized()


@pytest.mark.parametrize("host", ["nowhere.invalid:6379", f"{'a' * 64}:6379", "127.0.0.1:99999"])
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_unknown_host_is_refused_and_no_cluster_starts(scheme: str, host: str) -> None:
    with pytest.raises(OSError):
        join_or_start_cluster(f"{scheme}{host}", 1, False, "elastic")
    assert not ray.is_initialized()


def test_train_refuses_a_silent_address_in_one_line(
    silent_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit code is 2, and no files are written."""
    monkeypatch.setenv("RAY_ADDRESS", silent_address)
    train = ["elastic", "train", "tiny", "--data", "random", "--storage", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", train)
    with pytest.raises(SystemExit) as exited:
        main()
    [line] = capsys.readouterr().err.splitlines()
    assert exited.value.code == 2
    assert f"RAY_ADDRESS={silent_address}" in line and "Connection refused" in line
    assert not list(tmp_path.iterdir()) and not ray.is_initialized()


@pytest.fixture
def another_cluster() -> Iterator[socket.socket]:
    """The GCS of the local cluster of another command, whose raylet runs."""
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        sleeping = [sys.executable, "-c", "import time; time.sleep(300)"]
        raylet = subprocess.Popen(
            ["raylet/raylet", *sleeping[1:], f"--gcs-address={address}"], executable=sys.executable
        )
        yield gcs
        raylet.kill()
        raylet.wait()


@pytest.mark.parametrize("has_record", [False, True])
def test_private_cluster_of_another_command_is_not_joined(
    another_cluster: socket.socket,
    silent_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_record: bool,
) -> None:
    """The recorded cluster of a killed `ray start` is not joined either."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if has_record:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(silent_address)
    assert not join_existing_cluster(None, "elastic")
    with pytest.raises(ConnectionError):
        join_existing_cluster("auto", "elastic")
    another_cluster.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        another_cluster.accept()


def test_commands_that_start_together_share_one_token(tmp_path: Path) -> None:
    code = "from actors.ray_backend.cluster.ray_private import make_token; make_token()"
    other_variables = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    environment = {**other_variables, "HOME": str(tmp_path)}
    commands = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(timeout=120.0) for process in commands] == [0, 0, 0]
    [token] = (tmp_path / ".ray").iterdir()
    assert token.name == "auth_token" and len(token.read_text()) == 64
    assert token.stat().st_mode & 0o077 == 0, "readable only for this user"


def refuse_train(capsys: pytest.CaptureFixture[str], storage: Path) -> str:
    """The one-line refusal of `elastic train`, with exit code 2."""
    sys.argv = ["elastic", "train", "tiny", "--data", "random", "--storage", str(storage)]
    with pytest.raises(SystemExit) as exited:
        main()
    stderr = capsys.readouterr().err
    assert exited.value.code == 2, stderr
    [line] = stderr.splitlines()
    assert not ray.is_initialized() and not is_private()
    return line


@pytest.fixture
def ray_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Make `ray.init` raise, as it does only with a cluster of another version or on a bad node."""

    def fail_with(error: Exception) -> None:
        def init(**options: object) -> None:
            raise error

        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setattr(ray, "init", init)

    return fail_with


FAILURES = [
    RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3"),
    ray.exceptions.AuthenticationError("Authentication failed:\nthe token is another one"),
    ValueError("another error"),
    Exception("a bare exception"),
]


@pytest.mark.parametrize("error", FAILURES)
@pytest.mark.parametrize("is_named", [True, False])
def test_train_refuses_a_cluster_that_it_cannot_join_in_one_line(
    error: Exception,
    is_named: bool,
    ray_fails: Callable[[Exception], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ray_fails(error)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        if is_named:
            monkeypatch.setenv("RAY_ADDRESS", address)
        else:
            monkeypatch.delenv("RAY_ADDRESS", raising=False)
            (tmp_path / "ray").mkdir()
            (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        line = refuse_train(capsys, tmp_path / "runs")
    assert f"cannot be joined ({address}: {' '.join(str(error).split())[:60]}" in line
    assert "set RAY_ADDRESS=local" in line
    assert ("RAY_ADDRESS=127" in line) == is_named


@pytest.mark.parametrize("error", [*FAILURES, OSError("No space left on device")])
def test_train_refuses_a_local_cluster_that_it_cannot_start_in_one_line(
    error: Exception,
    ray_fails: Callable[[Exception], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ray_fails(error)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    line = refuse_train(capsys, tmp_path / "runs")
    assert "a local Ray cluster cannot be started" in line and "RAY_ADDRESS=" not in line
    assert " ".join(str(error).split())[:60] in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_address_that_another_user_recorded_is_not_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user may write into the folder of Ray."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    record = tmp_path / "ray" / "ray_current_cluster"
    record.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(record)
    else:
        record.write_text("127.0.0.1:6379\n")
        assert recorded_address() == "127.0.0.1:6379"
    if kind == "link":
        record.rename(tmp_path / "target")
        record.symlink_to(tmp_path / "target")
    os.chown(record, 65534, 65534, follow_symlinks=False)
    assert recorded_address() is None
