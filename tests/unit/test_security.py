"""Claims of docs/security.md: no unpickling, no shell, no stored credentials."""

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
from actors.snapshots.server import SnapshotServerProcess
from actors.storage.credentials import has_credentials, without_credentials
from pipelines.cli import main
from pipelines.errors import UserError
from pipelines.run.plan import TrainRequest, make_plan, store_recipe

ROOT = Path(__file__).parents[2]
PACKAGES = ("elastic", "actors", "pipelines")
UNPICKLERS = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "runpy"}
RUNNERS = {"eval", "exec", "os.system", "os.popen"}
SECRET = "hunter2"


def syntax_nodes() -> Iterator[tuple[str, ast.AST]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node


def imported_names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {str(node.module).partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


USERS = {
    "pipelines/reading/channel.py": "messages of a worker and its reader processes",
    "pipelines/settings/script_file.py": "sends classes of the user's script by value; reads none",
    "pipelines/custom_data/sample_shards/field_decoders.py": "pickles that the user allows",
    "pipelines/custom_data/sample_shards/mds_encodings.py": "pickles that the user allows",
}


def called_name(node: ast.AST) -> str:
    """`name` or `owner.name` of the called function; empty if the node is no call."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def loads_weights_only(node: ast.AST) -> bool:
    """Whether a call of `torch.load` runs no code of the file."""
    assert isinstance(node, ast.Call)
    options = {word.arg: word.value for word in node.keywords}
    chosen = options.get("weights_only")
    return isinstance(chosen, ast.Constant) and chosen.value is True


def test_packages_use_no_unpickler() -> None:
    """Invariant 11. Ray, torch and a worker's readers pickle between processes; stored data are
    JSON, Arrow or safetensors. Pickles in a user's own shards need `allow_pickle=True`."""
    places = [place for place, node in syntax_nodes() if imported_names(node) & UNPICKLERS]
    assert {place.partition(":")[0] for place in places} == USERS.keys()
    assert not [
        place
        for place, node in syntax_nodes()
        if called_name(node) in ("torch.load", "numpy.load") and not loads_weights_only(node)
    ]


def test_packages_run_no_shell_command() -> None:
    for place, node in syntax_nodes():
        assert called_name(node) not in RUNNERS, place
        if isinstance(node, ast.Call):
            shells = [word for word in node.keywords if word.arg == "shell"]
            assert not shells, place


def test_store_and_snapshot_server_listen_on_one_address_only() -> None:
    """The other address of this machine refuses connections to the same ports."""
    host, other = "127.0.0.2", "127.0.0.1"
    store = open_store(host)
    snapshot_server = SnapshotServerProcess("node", "", host, new_secret()).snapshot_server
    for port in (store.port, snapshot_server.port):
        socket.create_connection((host, port), 5.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), 5.0)
    TCPStore(host, store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"


class Bomb:
    """Creates the file `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def test_pickle_in_place_of_a_recipe_is_not_loaded(tmp_path: Path) -> None:
    mark = tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "unpickling has no effect"
    mark.unlink()
    request = TrainRequest("tiny", "run", str(tmp_path), data="random")
    store_recipe(make_plan(request, num_gpus=0))
    (tmp_path / "run" / "recipe.json").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises((UserError, ValueError)):
        make_plan(request, num_gpus=0)
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
def test_credentials_in_a_url_are_detected_and_not_shown(url: str) -> None:
    assert has_credentials(url)
    assert SECRET not in without_credentials(f"cannot open {url}: no answer")


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/runs?region=eu-west-1", "http://tracking:5000", "postgresql://me@host/db"],
)
def test_url_without_credentials_is_accepted(url: str) -> None:
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
    with pytest.raises(SystemExit) as exited:
        main()
    output = capsys.readouterr()
    assert exited.value.code == 2
    [line] = output.err.splitlines()
    assert option[0] in line and "environment" in line
    assert SECRET not in output.out + output.err
    assert not list(tmp_path.rglob("recipe.json"))


@pytest.mark.parametrize("command", ["status", "logs", "export", "reshard"])
def test_run_names_cannot_point_outside_the_storage(command: str, tmp_path: Path, capsys) -> None:
    options = {"logs": ["--worker", "w0"], "reshard": ["--layout", "dp=1"]}.get(command, [])
    line = expect_refusal(capsys, command, "../elsewhere", *options, "--storage", str(tmp_path))
    assert "'../elsewhere'" in line and "letters, digits" in line
