"""Bad input: one clear line, exit code 2, no traceback, nothing written or overwritten."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.cli import main

CASES = {
    "unknown recipe": (["tyni"], "tiny"),
    "recipe file is missing": (["nowhere.py:recipe"], "nowhere.py"),
    "recipe function is missing": (["pipelines.recipes:tinny"], "tinny"),
    "unknown key": (["tiny", "--set", "optimizer.lrr=1"], "optimizer.lr"),
    "value of another type": (["tiny", "--set", "optimizer.lr=fast"], "number"),
    "no value": (["tiny", "--set", "optimizer.lr"], "key=value"),
    "MIN over MAX": (["tiny", "--workers", "4:2"], "MIN:MAX"),
    "two stages a rank under 1F1B": (
        ["tiny", "--data", "random", "--workers", "2", "--layout", "pp=2,vp=2"],
        "--set schedule=interleaved_1f1b",
    ),
    "heads that tp does not divide": (
        ["tiny", "--data", "random", "--workers", "3", "--layout", "tp=3"],
        "tp=3 does not divide 2",
    ),
    "experts where there are none": (
        ["tiny", "--data", "random", "--workers", "2", "--layout", "fsdp=2,ep=2"],
        "this model has no experts",
    ),
    "more stages than layers": (
        ["tiny", "--data", "random", "--workers", "8", "--layout", "pp=8"],
        "8 stages, but the model has 4 layers",
    ),
    "zero workers": (["tiny", "--workers", "0"], "at least 1"),
    "workers are no number": (["tiny", "--workers", "many"], "MIN:MAX"),
    "layout cannot fit": (["tiny", "--workers", "2", "--layout", "fsdp=4"], "--workers"),
    "layout has an unknown axis": (["tiny", "--layout", "zp=2"], "dp=2"),
    "layout has a bad degree": (["tiny", "--layout", "dp=two"], "whole number"),
    "too many data ranks": (["tiny", "--workers", "16", "--layout", "dp=16"], "microbatch"),
    "batch is no multiple": (["tiny", "--set", "batch=10", "--set", "microbatch=4"], "multiple"),
    "data are missing": (["tiny", "--data", "nowhere/*.txt"], "nowhere"),
    "run name leaves the storage": (["tiny", "--run-name", "../x"], "run-name"),
    "a fault at another moment": (
        ["tiny", "--inject", "flip a bit in worker 1 in vote at step 7"],
        "leave the moment out",
    ),
    "no spike": (["tiny", "--set", "spike_factor=0.5"], "more than 1"),
    "sentence is not understood": (["tiny", "--inject", "hurt worker 1"], "kill worker 3"),
    "redundancy is unknown": (["tiny", "--set", "snapshot_redundancy=raid6"], "copy, or xor:3"),
    "parity of nothing": (["tiny", "--set", "snapshot_redundancy=xor:0"], "copy, or xor:3"),
    "steps to trace end before they begin": (["tiny", "--profile", "steps=9:3"], "steps=10:13"),
    "no steps to trace": (["tiny", "--profile", "10"], "steps=10:13"),
    "in this process with others": (["tiny", "--in-process", "--workers", "2"], "drop --workers 2"),
    "steps are negative": (["tiny", "--steps", "-5"], "greater than 0"),
}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command line; it must exit with 2 and say one line."""
    sys.argv = ["elastic", *arguments]
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2, told
    [line] = told.err.splitlines()
    assert "Traceback" not in line
    return line


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path / "runs"


@pytest.mark.parametrize("name", CASES)
def test_is_refused_in_one_line(name: str, storage: Path, capsys) -> None:
    arguments, mend = CASES[name]
    if "--data" not in arguments:
        arguments = [*arguments, "--data", "random"]
    line = refused(capsys, "train", *arguments, "--storage", str(storage))
    assert mend in line
    assert not (storage / "x").exists()
    assert not list(storage.glob("*/recipe.json"))


def test_empty_data(storage: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty.txt").write_text("")
    line = refused(
        capsys, "train", "tiny", "--storage", str(storage), "--data", str(tmp_path / "empty.txt")
    )
    assert "empty.txt" in line


def test_a_foreign_arrow_file(storage: Path, tmp_path: Path, capsys) -> None:
    foreign = tmp_path / "foreign.arrow"
    table = pa.table({"numbers": [1, 2, 3]})
    with pa.OSFile(str(foreign), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    line = refused(capsys, "train", "tiny", "--storage", str(storage), "--data", str(foreign))
    assert "foreign.arrow" in line and "text" in line


def test_storage_that_cannot_be_written(tmp_path: Path, storage: Path, capsys) -> None:
    (tmp_path / "file").write_text("in the way")
    line = refused(capsys, "train", "tiny", "--data", "random", "--storage", str(tmp_path / "file"))
    assert "--storage" in line or "file" in line
    assert (tmp_path / "file").read_text() == "in the way"


def test_an_unknown_option(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.argv = ["elastic", "train", "tiny", "--wrokers", "4"]
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--workers" in capsys.readouterr().err
