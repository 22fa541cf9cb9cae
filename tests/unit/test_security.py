"""What docs/security.md says: nothing is unpickled, no shell is used, credentials are not kept."""

from __future__ import annotations

import ast
import pickle
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_bad_input import expect_refusal
from torch.distributed import TCPStore

from actors.distributed.store import open_store
from actors.runtime.handshake import new_secret
from actors.snapshots.server import SnapshotHost
from actors.storage.credentials import has_credentials, without_credentials
from pipelines.cli import main
from pipelines.run.plan import TrainRequest, make_plan, store_recipe
from pipelines.settings.errors import UserError

ROOT = Path(__file__).parents[2]
PACKAGES = ("elastic", "actors", "pipelines")
UNPICKLERS = {"pickle", "cloudpickle", "dill", "retire_snapshot_set", "marshal", "joblib", "runpy"}
RUNNERS = {"eval", "exec", "os.system", "os.popen"}
SECRET = "hunter2"


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {str(node.module).partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def called(node: ast.AST) -> str:
    """`name`, or `owner.name`, of what a call calls; empty for all else."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def test_nothing_that_unpickles_is_used() -> None:
    """Invariant 11. Between processes Ray and torch pickle; what is stored is JSON, Arrow or
    safetensors."""
    assert not [where for where, node in nodes() if imported(node) & UNPICKLERS]
    assert not [where for where, node in nodes() if called(node) in ("torch.load", "numpy.load")]


def test_no_string_is_given_to_a_shell() -> None:
    for where, node in nodes():
        assert called(node) not in RUNNERS, where
        if isinstance(node, ast.Call):
            shells = [word for word in node.keywords if word.arg == "shell"]
            assert not shells, where


def test_store_and_keeper_listen_on_one_address_only() -> None:
    """Of this machine's two, the one that is not theirs has nobody at the port."""
    host, other = "127.0.0.2", "127.0.0.1"
    store = open_store(host)
    snapshot_server = SnapshotHost("node", "", host, new_secret()).snapshot_server
    for port in (store.port, snapshot_server.port):
        socket.create_connection((host, port), 5.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), 5.0)
    TCPStore(host, store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"


class Bomb:
    """Tells of itself when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def test_a_pickle_in_the_place_of_a_recipe_is_not_loaded(tmp_path: Path) -> None:
    mark = tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb is a dud"
    mark.unlink()
    asked = TrainRequest("tiny", "run", str(tmp_path), data="random")
    store_recipe(make_plan(asked, num_gpus=0))
    (tmp_path / "run" / "recipe.json").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises((UserError, ValueError)):
        make_plan(asked, num_gpus=0)
    assert not mark.exists()


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@tracking:5000",
        "s3://key:hunter2@bucket/runs",
        "s3://bucket/runs?secret_key=hunter2",
        "abfs://container/runs?region=x&sas_token=hunter2",
        "https://tracking/?api_key=hunter2",
    ],
)
def test_credentials_are_seen_and_not_shown(url: str) -> None:
    assert has_credentials(url)
    assert SECRET not in without_credentials(f"cannot open {url}: no answer")


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/runs?region=eu-west-1", "http://tracking:5000", "postgresql://me@host/db"],
)
def test_what_has_no_credentials_is_let_through(url: str) -> None:
    assert not has_credentials(url)


@pytest.mark.parametrize(
    "option",
    [
        ("--storage", "s3://key:hunter2@bucket/runs"),
        ("--storage", "s3://bucket/runs?access_key=x&secret_key=hunter2"),
        ("--storage", "gs://bucket/runs?token=hunter2"),
        ("--tracking-uri", "http://me:hunter2@tracking:5000"),
    ],
    ids=lambda option: option[1],
)
def test_credentials_in_options_are_refused_and_not_repeated(
    option: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["elastic", "train", "tiny", "--data", "random", *option])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2
    [line] = told.err.splitlines()
    assert option[0] in line and "environment" in line
    assert SECRET not in told.out + told.err
    assert not list(tmp_path.rglob("recipe.json"))


@pytest.mark.parametrize("command", ["status", "logs", "export", "reshard"])
def test_no_command_leaves_the_storage(command: str, tmp_path: Path, capsys) -> None:
    more = {"logs": ["--worker", "w0"], "reshard": ["--layout", "dp=1"]}.get(command, [])
    told = expect_refusal(capsys, command, "../elsewhere", *more, "--storage", str(tmp_path))
    assert "'../elsewhere'" in told and "letters, digits" in told
