"""Bad input: one clear line, exit code 2, no traceback, nothing written or overwritten."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
import ray

from actors.ray_backend.cluster.connection import own_node_address
from actors.storage.reachability import ENDPOINTS, PROXIES, REGIONS, endpoint_of, refuse_unreachable
from pipelines.cli import main
from pipelines.run.plan import TrainRequest, make_plan, store_recipe

ROOT = Path(__file__).parents[2]

CASES = {
    "unknown recipe": (["tyni"], "tiny"),
    "recipe file is missing": (["nowhere.py:recipe"], "nowhere.py"),
    "recipe function is missing": (["pipelines.run.recipes:tinny"], "tinny"),
    "unknown key": (["tiny", "--set", "optimizer.lrr=1"], "optimizer.lr"),
    "value of another type": (["tiny", "--set", "optimizer.lr=fast"], "number"),
    "no value": (["tiny", "--set", "optimizer.lr"], "key=value"),
    "MIN over MAX": (["tiny", "--workers", "4:2"], "MIN:MAX"),
    "two stages per rank under 1F1B": (
        ["tiny", "--data", "random", "--workers", "2", "--layout", "pp=2,vp=2"],
        "--set schedule=interleaved_1f1b",
    ),
    "heads that tp does not divide": (
        ["tiny", "--data", "random", "--workers", "3", "--layout", "tp=3"],
        "tp=3 does not divide 2",
    ),
    "expert parallelism without experts": (
        ["tiny", "--data", "random", "--workers", "2", "--layout", "fsdp=2,ep=2"],
        "this model has no experts",
    ),
    "more stages than layers": (
        ["tiny", "--data", "random", "--workers", "8", "--layout", "pp=8"],
        "8 stages, but the model has 4 layers",
    ),
    "zero workers": (["tiny", "--workers", "0"], "at least 1"),
    "workers are not a number": (["tiny", "--workers", "many"], "MIN:MAX"),
    "layout does not fit": (["tiny", "--workers", "2", "--layout", "fsdp=4"], "--workers"),
    "layout has an unknown axis": (["tiny", "--layout", "zp=2"], "dp=2"),
    "layout has a bad degree": (["tiny", "--layout", "dp=two"], "whole number"),
    "too many data ranks": (["tiny", "--workers", "16", "--layout", "dp=16"], "microbatch"),
    "batch is not a multiple": (["tiny", "--set", "batch=10", "--set", "microbatch=4"], "multiple"),
    "data are missing": (["tiny", "--data", "nowhere/*.txt"], "nowhere"),
    "run name leaves the storage": (["tiny", "--run-name", "../x"], "run-name"),
    "a fault at an impossible moment": (
        ["tiny", "--inject", "flip a bit in worker 1 in vote at step 7"],
        "leave out the moment",
    ),
    "spike factor below 1": (["tiny", "--set", "loss_monitor.spike_factor=0.5"], "greater than 1"),
    "sentence is not understood": (["tiny", "--inject", "hurt worker 1"], "kill worker 3"),
    "redundancy is unknown": (["tiny", "--set", "snapshot.redundancy=raid6"], "copy, or xor:3"),
    "parity of zero snapshots": (["tiny", "--set", "snapshot.redundancy=xor:0"], "copy, or xor:3"),
    "steps to trace end before they begin": (["tiny", "--profile", "steps=9:3"], "steps=10:13"),
    "no steps to trace": (["tiny", "--profile", "10"], "steps=10:13"),
    "in-process with several workers": (
        ["tiny", "--in-process", "--workers", "2"],
        "drop --workers 2",
    ),
    "steps are negative": (["tiny", "--steps", "-5"], "--steps -5: input should be greater than 0"),
    "steps are zero": (["tiny", "--steps", "0"], "--steps 0: input should be greater than 0"),
    "steps of 23 digits": (["tiny", "--steps", "1" * 23], "--steps 1111"),
    "steps in full-width digits": (["tiny", "--steps", "\uff14"], "'--steps'"),
    "an infinite timeout": (["tiny", "--set", "growth.start_timeout_s=inf"], "finite"),
    "a timeout of centuries": (
        ["tiny", "--set", "failure.hang_timeout_s=1e300"],
        "less than or equal",
    ),
    "an infinite learning rate": (["tiny", "--set", "optimizer.lr=inf"], "finite"),
    "a learning rate that is not a number": (["tiny", "--set", "optimizer.lr=nan"], "finite"),
    "minutes in other digits": (
        ["tiny", "--set", "checkpoint.every=\u0663min"],
        "checkpoint.every",
    ),
    "minutes out of bounds": (["tiny", "--set", f"checkpoint.every={'9' * 400}min"], "integer"),
    "a model with too many layers": (["tiny", "--set", "model.num_layers=100000"], "10000"),
    "a seed too large": (["tiny", "--set", f"seed={2**63}"], "less than"),
    "a trillion workers": (["tiny", "--workers", "999999999999"], "at most 100,000 workers"),
    "workers in full-width digits": (["tiny", "--workers", "\uff14"], "MIN:MAX"),
    "a layout in full-width digits": (["tiny", "--layout", "dp=\uff12"], "whole number"),
    "a layout of 23 digits": (["tiny", "--layout", f"dp={'9' * 23}"], "whole number"),
    "ports in full-width digits": (["tiny", "--ports", "\uff120:\uff130"], "--ports"),
    "a profile in full-width digits": (["tiny", "--profile", "steps=\uff12:\uff13"], "10:13"),
    "a fault in full-width digits": (
        ["tiny", "--inject", "kill worker \uff13 at step 6"],
        "--inject",
    ),
    "a microbatch over the batch": (
        ["tiny", "--set", "batch=12", "--set", "microbatch=24"],
        "set batch to 24, or microbatch to 12",
    ),
    "an empty layout": (["tiny", "--layout", ""], "--layout is empty"),
    "a blank layout": (["tiny", "--layout", " "], "--layout is empty"),
    "an empty run name": (["tiny", "--run-name", ""], "--run-name is empty"),
    "an empty interface": (["tiny", "--interface", ""], "--interface is empty"),
    "an empty tracking store": (["tiny", "--tracking-uri", ""], "--tracking-uri is empty"),
    "a run name that is the data folder": (["tiny", "--run-name", "data"], "--run-name data: "),
    "a run name that is the sweeps folder": (
        ["tiny", "--run-name", "Sweeps"],
        "--run-name Sweeps: ",
    ),
    "an unknown kind of tracking store": (["tiny", "--tracking-uri", "banana://x"], "'banana'"),
    "a lone surrogate": (["tiny", "--set", "accelerator=\udcff"], "accelerator=\\udcff: not valid"),
    "a module without a name": ([":f"], "module:function"),
    "a module name of dots": (["..:f"], "module:function"),
}
BEFORE_RAY = {
    "no such interface": (
        ["--interface", "nosuch0"],
        "--interface nosuch0: this machine has no such",
    ),
    "no such accelerator": (["--set", "accelerator=banana"], "accelerator=banana"),
    "nothing to detach from": (["--detach"], "ray start --head"),
}
MAX_REFUSAL_S = 3.0


def expect_refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command line; it must exit with 2 and print one line."""
    sys.argv = ["elastic", *arguments]
    with pytest.raises(SystemExit) as exited:
        main()
    output = capsys.readouterr()
    assert exited.value.code == 2, output
    [line] = output.err.splitlines()
    assert "Traceback" not in line
    return line


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path / "runs"


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_in_one_line(name: str, storage: Path, capsys) -> None:
    arguments, fix = CASES[name]
    if "--data" not in arguments:
        arguments = [*arguments, "--data", "random"]
    line = expect_refusal(capsys, "train", *arguments, "--storage", str(storage))
    assert fix in line
    assert not (storage / "x").exists()
    assert not list(storage.glob("*/recipe.json"))


def expect_refusal_in_time(
    capsys: pytest.CaptureFixture[str], storage: Path, *arguments: str
) -> str:
    """The refusal comes without a dry run; a later one would let Ray start."""
    started = time.process_time()
    line = expect_refusal(
        capsys, "train", "tiny", "--data", "random", "--storage", str(storage), *arguments
    )
    assert time.process_time() - started < MAX_REFUSAL_S
    assert not ray.is_initialized()
    assert not list(storage.glob("*/recipe.json"))
    return line


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")


@pytest.mark.parametrize("name", BEFORE_RAY)
def test_bad_input_is_refused_before_ray_starts(
    name: str, storage: Path, capsys, no_cluster
) -> None:
    arguments, fix = BEFORE_RAY[name]
    assert fix in expect_refusal_in_time(capsys, storage, *arguments)


def test_used_port_is_refused_before_ray_starts(storage: Path, capsys, no_cluster) -> None:
    with socket.create_server((own_node_address(), 0)) as taken:
        port = taken.getsockname()[1]
        line = expect_refusal_in_time(capsys, storage, "--ports", f"{port}:{port}")
    assert f"--ports {port}:{port}: no port of the range can be opened" in line


def test_unreachable_storage_is_refused_before_arrow_retries(
    storage: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = f"s3://bucket/runs?endpoint_override=http://127.0.0.1:{port}"
    line = expect_refusal_in_time(capsys, storage, "--storage", url)
    assert "--storage" in line and "cannot be reached" in line and "refused" in line


def test_unreachable_data_are_refused_before_arrow_retries(
    storage: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = f"s3://bucket/data?endpoint_override=http://127.0.0.1:{port}"
    line = expect_refusal_in_time(capsys, storage, "--data", url)
    assert f"--data {url}: cannot be reached (127.0.0.1:{port}: Connection refused)" in line


@pytest.mark.parametrize(
    ("query", "environment", "has_file", "endpoint"),
    [
        ("", {}, False, ("s3.amazonaws.com", 443)),
        ("?region=eu-west-1", {"AWS_REGION": "x"}, True, ("s3.eu-west-1.amazonaws.com", 443)),
        ("", {"AWS_DEFAULT_REGION": "eu-west-1"}, False, ("s3.eu-west-1.amazonaws.com", 443)),
        ("", {"AWS_REGION": "cn-north-1"}, False, ("s3.cn-north-1.amazonaws.com.cn", 443)),
        ("", {"AWS_ENDPOINT_URL": "http://minio:9000"}, False, ("minio", 9000)),
        ("?region=x", {"AWS_ENDPOINT_URL_S3": "http://minio"}, True, ("minio", 80)),
        ("?endpoint_override=a:1", {"AWS_ENDPOINT_URL": "http://minio"}, True, ("a", 1)),
        ("", {}, True, None),
    ],
)
def test_endpoint_of_an_object_store_follows_url_environment_and_region(
    query: str,
    environment: dict[str, str],
    has_file: bool,
    endpoint: tuple[str, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The region is unknown if the SDK's configuration file may set it."""
    for name in (*ENDPOINTS, *REGIONS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    if has_file:
        (tmp_path / "config").write_text("")
    assert endpoint_of(f"s3://bucket/data{query}") == endpoint
    assert endpoint_of("gs://bucket/data") is None


def test_storage_that_never_answers_is_refused_in_time(capsys, storage: Path) -> None:
    """The host neither accepts nor refuses a connection."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        with contextlib.ExitStack() as waiting:
            for _ in range(2):  # fill the backlog of a socket that accepts none
                peer = waiting.enter_context(socket.socket())
                peer.setblocking(False)
                peer.connect_ex(("127.0.0.1", port))
            started = time.monotonic()
            with pytest.raises(OSError, match=f"127.0.0.1:{port}: "):
                refuse_unreachable(f"s3://b/runs?endpoint_override=http://127.0.0.1:{port}")
            assert time.monotonic() - started < MAX_REFUSAL_S


def test_reshard_command_refuses_an_empty_layout(storage: Path, capsys) -> None:
    line = expect_refusal(capsys, "reshard", "run", "--layout", "", "--storage", str(storage))
    assert "--layout is empty" in line


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "-1"])
def test_sweep_refuses_a_start_timeout_that_is_not_finite_and_positive(
    seconds: str, storage: Path, capsys
) -> None:
    arguments = ("sweep", "tiny", "--layouts", "dp=2", "--start-timeout", seconds)
    assert "--start-timeout" in expect_refusal(capsys, *arguments, "--storage", str(storage))


def test_command_in_its_own_process_refuses_in_one_line_with_exit_code_2(tmp_path: Path) -> None:
    """The argument has the bytes that a shell would pass."""
    exited = subprocess.run(
        [sys.executable, "-m", "pipelines", "train", b"tiny\xff", "--storage", str(tmp_path)],
        capture_output=True,
        cwd=ROOT,
    )
    assert exited.returncode == 2 and not exited.stdout
    message = b"elastic: argument tiny\\udcff: not valid UTF-8; rename or retype it\n"
    assert exited.stderr == message


def test_other_training_settings_than_the_stored_run_are_refused(storage: Path, capsys) -> None:
    request = TrainRequest("tiny", "run", str(storage), data="random")
    store_recipe(make_plan(request, num_gpus=0))
    before = (storage / "run" / "recipe.json").read_text()
    arguments = ("tiny", "--run-name", "run", "--storage", str(storage), "--data", "random")
    line = expect_refusal(capsys, "train", *arguments, "--set", "optimizer.lr=0.5")
    assert "optimizer.lr: 0.003 -> 0.5" in line
    assert (storage / "run" / "recipe.json").read_text() == before


def test_stored_recipe_with_values_out_of_bounds_is_refused(storage: Path, capsys) -> None:
    """A version without these bounds wrote the recipe."""
    request = TrainRequest("tiny", "run", str(storage), data="random")
    store_recipe(make_plan(request, num_gpus=0))
    file = storage / "run" / "recipe.json"
    stored = json.loads(file.read_text())
    stored["settings"]["growth"]["start_timeout_s"] = 1e300
    file.write_text(json.dumps(stored))
    arguments = ("tiny", "--run-name", "run", "--storage", str(storage), "--data", "random")
    line = expect_refusal(capsys, "train", *arguments)
    assert "recipe.json" in line and "growth.start_timeout_s" in line


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (5, "(settings: input should be"),
        ({"of_a_later_version": 1}, "(settings: of_a_later_version: extra inputs"),
        ({"optimizer": {"lr": -1}}, "(settings: optimizer.lr: input should be"),
    ],
)
def test_unusable_stored_recipe_is_refused_with_the_repair_command(
    storage: Path, capsys, settings: object, problem: str
) -> None:
    store_recipe(make_plan(TrainRequest("tiny", "run", str(storage), data="random"), num_gpus=0))
    file = storage / "run" / "recipe.json"
    stored = json.loads(file.read_text())
    is_object = isinstance(settings, dict)
    stored["settings"] = {**stored["settings"], **settings} if is_object else settings
    file.write_text(json.dumps(stored))
    arguments = ("tiny", "--run-name", "run", "--storage", str(storage), "--data", "random")
    line = expect_refusal(capsys, "train", *arguments)
    assert f"{file} cannot be used {problem}" in line
    assert f"`elastic doctor run --storage {storage} --repair` sets it aside" in line
    assert ": :" not in line


def test_empty_data_file_is_refused(storage: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty.txt").write_text("")
    line = expect_refusal(
        capsys, "train", "tiny", "--storage", str(storage), "--data", str(tmp_path / "empty.txt")
    )
    assert "empty.txt" in line


def test_arrow_file_without_text_is_refused(storage: Path, tmp_path: Path, capsys) -> None:
    foreign = tmp_path / "foreign.arrow"
    table = pa.table({"numbers": [1, 2, 3]})
    with pa.OSFile(str(foreign), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    line = expect_refusal(
        capsys, "train", "tiny", "--storage", str(storage), "--data", str(foreign)
    )
    assert "foreign.arrow" in line and "text" in line


def test_storage_that_is_a_file_is_refused_and_not_overwritten(
    tmp_path: Path, storage: Path, capsys
) -> None:
    (tmp_path / "file").write_text("in the way")
    line = expect_refusal(
        capsys, "train", "tiny", "--data", "random", "--storage", str(tmp_path / "file")
    )
    assert "--storage" in line or "file" in line
    assert (tmp_path / "file").read_text() == "in the way"


def test_unknown_option_is_refused_with_a_similar_one(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--workers" in expect_refusal(capsys, "train", "tiny", "--wrokers", "4")
