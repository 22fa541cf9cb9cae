"""The layouts of a sweep, and its table from the files of its runs."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from written_runs import append

from elastic.geometry.layout import Layout
from pipelines.errors import UserError
from pipelines.observe.history.run_folder import RunFolder
from pipelines.observe.view.sweep_table import (
    ON_DEVICE,
    ON_HOST,
    Row,
    measure,
    refused,
    show,
    write,
)
from pipelines.run.plan import TrainRequest
from pipelines.run.sweep import SweepRequest, parse_layouts, sweep

TP2 = Layout(tp=2)


def append_sample(folder: RunFolder, worker: str, time: float, **sizes: int | None) -> None:
    sizes = {"host_memory_bytes": 0, "host_peak_bytes": 0, "device_peak_bytes": None} | sizes
    append(folder.system, {"time": time, "worker": worker} | sizes)


def append_stop(folder: RunFolder, outcome: str, reason: str = "") -> None:
    append(
        folder.journal, {"time": 9.0, "command": "Stopped", "outcome": outcome, "reason": reason}
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Three steps of two workers; the second one holds more."""
    folder = RunFolder.of(tmp_path, "tp2")
    append(folder.journal, {"time": 2.0, "command": "Form", "reason": "it fits"})
    state = [
        {"param_bytes": 4, "grad_bytes": 5, "optimizer_bytes": 9},
        {"param_bytes": 5, "grad_bytes": 5, "optimizer_bytes": 8},
    ]
    append(folder.journal, {"time": 3.0, "command": "Resume", "layout": "tp=2", "state": state})
    for step, step_s in enumerate((9.0, 0.2, 0.4), start=1):
        line = {"step": step, "step_s": step_s, "tokens": 120, "loss": 5.0 - step}
        append(folder.metrics, line)
    return folder


def test_layouts_are_separated_by_semicolons() -> None:
    assert parse_layouts("tp=1; tp=2;dp=2,tp=2") == [Layout(), TP2, Layout(dp=2, tp=2)]


@pytest.mark.parametrize(
    "text", ["", "tp=1;", "tp=2; banana=3", "tp=two", "tp=2; tp=2", "dp=1;tp=1"]
)
def test_malformed_list_of_layouts_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="--layouts") as refusal:
        parse_layouts(text)
    assert "\n" not in str(refusal.value)


def test_sweep_of_one_step_is_refused(tmp_path: Path) -> None:
    train = TrainRequest("tiny", storage=str(tmp_path), steps=1)
    with pytest.raises(UserError, match="--steps 1"):
        sweep(SweepRequest(train, "tp=1"), Console(file=io.StringIO()))


def test_sweep_without_a_feasible_layout_starts_no_run(tmp_path: Path) -> None:
    output = io.StringIO()
    train = TrainRequest("tiny", storage=str(tmp_path), data="random")
    request = SweepRequest(train, "tp=8; dp=99")
    assert sweep(request, Console(file=output, width=110)) == 1
    assert "tp=8: not feasible: tp=8 does not divide 2" in output.getvalue()
    assert "dp=99: not feasible" in output.getvalue()
    [sweep_folder] = (tmp_path / "sweeps").iterdir()
    rows = list(csv.DictReader((sweep_folder / "sweep.csv").open()))
    assert [(row["layout"], row["workers"]) for row in rows] == [("tp=8", "8"), ("dp=99", "99")]


def test_row_of_a_cpu_run_has_host_memory(folder: RunFolder) -> None:
    for worker, before, peak in (("w0", 100, 150), ("w1", 300, 340)):
        append_sample(folder, worker, 0.5, host_memory_bytes=before - 50, host_peak_bytes=900)
        append_sample(folder, worker, 1.0, host_memory_bytes=before, host_peak_bytes=900)
        append_sample(folder, worker, 5.0, host_memory_bytes=before, host_peak_bytes=peak)
    append_stop(folder, "completed")
    assert measure(TP2, folder) == Row(
        "tp=2", 2, "ran", "", pytest.approx(0.3), pytest.approx(400), 5, 5, 9, 50, ON_HOST, 2.0
    )


def test_row_prefers_device_memory(folder: RunFolder) -> None:
    append_sample(folder, "w0", 5.0, host_peak_bytes=900, device_peak_bytes=70)
    append_stop(folder, "completed")
    row = measure(TP2, folder)
    assert (row.peak_bytes, row.peak_is_of) == (70, ON_DEVICE)


@pytest.mark.parametrize(
    ("outcome", "kind", "verdict"),
    [
        ("failed", "memory", "out of memory"),
        ("failed", "program", "failed"),
        ("user_error", "program", "not feasible"),
        ("interrupted", "peer", "interrupted"),
        ("completed", "peer", "ran"),
    ],
)
def test_verdict_follows_the_outcome_and_the_failure_kind(
    folder: RunFolder, outcome: str, kind: str, verdict: str
) -> None:
    append(folder.journal, {"time": 8.0, "event": "WorkerRaised", "kind": kind})
    append_stop(folder, outcome, "w1: as it was")
    row = measure(TP2, folder)
    assert row.verdict == verdict
    assert row.reason == ("" if verdict == "ran" else "w1: as it was")


def test_layout_that_ran_out_of_memory_is_named_although_the_run_went_on(
    folder: RunFolder,
) -> None:
    line = {"time": 8.0, "event": "WorkerRaised", "kind": "memory", "message": "no memory left"}
    append(folder.journal, line)
    append_stop(folder, "completed")
    row = measure(TP2, folder)
    assert (row.verdict, row.reason) == ("out of memory", "no memory left")


def test_row_of_another_layout_than_requested_is_not_feasible(folder: RunFolder) -> None:
    append_stop(folder, "completed")
    row = measure(Layout(dp=2), folder)
    assert (row.layout, row.verdict, row.step_s) == ("dp=2", "not feasible", None)
    assert row.reason == "tp=2 was chosen instead: it fits"


def test_run_without_a_stop_has_failed(folder: RunFolder) -> None:
    assert measure(TP2, folder, "the controller died").reason == "the controller died"
    assert measure(TP2, folder).verdict == "failed"


def test_sweep_table_is_shown_and_written_to_files(tmp_path: Path) -> None:
    ran = Row("tp=2", 2, "ran", "", 0.25, 800.0, 10**6, 10**6, 2 * 10**6, 5 * 10**6, ON_HOST, 1.5)
    ran = replace(ran, tflops=0.75, mfu=0.5)
    rows = [ran, refused(Layout(tp=8), "too few heads"), replace(ran, verdict="failed", reason="x")]
    output = io.StringIO()
    show(Console(file=output, width=110), "a sweep", rows)
    [line] = [line for line in output.getvalue().splitlines() if "0.2500" in line]
    assert line.split() == [
        "tp=2",
        "2",
        "0.2500",
        "800",
        "400",
        "0.75",
        "(50%)",
        "1.00",
        "1.00",
        "2.00",
        "5.00",
        "1.500000",
    ]
    assert "tp=8: not feasible: too few heads" in output.getvalue()
    assert ON_HOST in output.getvalue()
    as_csv, as_json = write(tmp_path, rows)
    assert [row["verdict"] for row in json.loads(as_json.read_text())] == [
        "ran",
        "not feasible",
        "failed",
    ]
    assert len(as_csv.read_text().splitlines()) == 4
