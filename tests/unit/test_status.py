"""`elastic status` and `elastic logs` of runs in progress, ended runs and undriven runs."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from written_runs import MIDNIGHT, WrittenRun

from actors.storage.storage import DiskStorage
from elastic.protocol.commands import StartWorkers
from elastic.protocol.events import Checkpointed, ComputeTimed, WorkerRaised
from elastic.protocol.notes import NodeQuarantined, Waited
from pipelines.cli import main
from pipelines.errors import UserError
from pipelines.observe.history.history import read_history
from pipelines.observe.history.history_file import load_history
from pipelines.observe.sidecar.run_metrics import metrics_of
from pipelines.observe.view.status import parse_prices
from pipelines.observe.view.status_report import RunStatus


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WrittenRun:
    """A run of one minute: sixty steps, a lost, a standby and a starting worker."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    run = WrittenRun(tmp_path / "first", now=time.time() - 60)
    (tmp_path / "first" / "recipe.json").write_text("{}")
    run.start(3, steps=100)
    for number in range(60):
        run.commit(loss=5 - number / 20, step_s=0.5)
    run.append_event(Checkpointed(60, 1, "checkpoints/step-00000060-g1"))
    run.lose("w2", "connection reset")
    run.now += 0.25
    run.resume("w1", "w0")
    run.commit(loss=2.0)
    run.ready("w3", "node-1")
    run.append_command(StartWorkers(("w4",)))
    return run


def write_lease(run: WrittenRun, age_s: float = 0.0, **owner: object) -> None:
    """Write a lease as if this process drove the run."""
    lease = run.folder.path / "lease"
    lease.mkdir(exist_ok=True)
    started = psutil.Process().create_time()
    body = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
    body |= {"cluster": "", **owner}
    (lease / "1-0").write_text(json.dumps(body))
    os.utime(lease / "1-0", (time.time() - age_s,) * 2)


def run_elastic(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    sys.argv = ["elastic", *arguments]
    with pytest.raises(SystemExit) as exited:
        main()
    output = capsys.readouterr()
    return int(exited.value.code or 0), output.out, output.err


def status_page(capsys: pytest.CaptureFixture[str], run: WrittenRun, *arguments: str) -> str:
    code, out, err = run_elastic(
        capsys, "status", "first", "--storage", run.folder.storage, *arguments
    )
    assert (code, err) == (0, "")
    return out


def status_json(capsys: pytest.CaptureFixture[str], run: WrittenRun) -> dict[str, Any]:
    [line] = status_page(capsys, run, "--json").splitlines()
    return json.loads(line)


@pytest.mark.parametrize(
    ("kind", "unit"), [("custom", "samples"), ("mlp", "samples"), ("transformer", "tokens")]
)
def test_speed_counts_samples_or_tokens_by_model(
    run: WrittenRun, capsys, kind: str, unit: str
) -> None:
    recipe = {"settings": {"model": {"kind": kind}}}
    (run.folder.path / "recipe.json").write_text(json.dumps(recipe))
    assert f" {unit}/s, " in status_page(capsys, run)
    assert status_json(capsys, run)["unit"] == unit
    loaded = load_history(run.folder)
    loaded.follow()
    values = {metric.name: metric.value for metric in metrics_of(loaded.history, run.now)}
    assert (values["elastic_samples_per_s"] is None) == (unit == "tokens")


def test_status_of_a_training_run(run: WrittenRun, capsys) -> None:
    write_lease(run, cluster="10.0.0.1:6379")
    page = status_page(capsys, run)
    for part in (
        "first · training",
        f"driven by process {os.getpid()} on {socket.gethostname()}, Ray cluster 10.0.0.1:6379",
        "61 of 100 · ",
        "2.0000",
        "2 of 3 workers, dp=2, generation 2, 1 standby",
        "step 60, ",
        "goodput 9",
        "w2 lost: connection reset",
        "generation 2: 2 workers (dp=2) from step 61",
    ):
        assert part in page, part
    rows = [line.split() for line in page.splitlines() if line.strip().endswith("ago")]
    assert ["0", "w1", "node-0", "100"] in [row[:4] for row in rows], "world ranks, not names"
    assert any(row[:3] == ["standby", "w3", "node-1"] for row in rows)
    assert "starting  w4" in page
    assert not any(line.endswith(" ") for line in page.splitlines())


def test_json_status_has_the_same_content(run: WrittenRun, capsys) -> None:
    write_lease(run)
    status = status_json(capsys, run)
    assert (status["phase"], status["outcome"], status["step"]) == ("training", None, 61)
    assert [(w["worker"], w["role"], w["world_rank"]) for w in status["workers"]] == [
        ("w1", "member", 0),
        ("w0", "member", 1),
        ("w3", "standby", None),
        ("w4", "starting", None),
    ]
    assert status["driver"]["pid"] == os.getpid()
    assert status["checkpoint"]["step"] == 60
    parts = status["goodput"]
    spent = sum(parts[f"{name}_s"] for name in ("compute", "redone", "paused", "waiting"))
    assert parts["wall_s"] == pytest.approx(spent) == pytest.approx(60, abs=30)
    hours = {row["place"]: row["hours"] * 3600 for row in status["worker_hours"]}
    assert hours["node-0"] == pytest.approx(60 + 60 + 30.5, abs=60)
    assert hours["node-1"] == pytest.approx(29, abs=30)


def test_slow_workers_and_quarantined_nodes_are_shown(run: WrittenRun, capsys) -> None:
    write_lease(run)
    run.append_event(ComputeTimed(2, 61, (0.25, 0.75)))
    run.append_command(
        NodeQuarantined("node-1", time.time() + 3600, "workers have crashed there 3 times")
    )
    status = status_json(capsys, run)
    assert [w["compute_s"] for w in status["workers"]] == [0.25, 0.75, None, None]
    assert [row["node"] for row in status["quarantined_nodes"]] == ["node-1"]
    page = status_page(capsys, run)
    assert "node node-1, for " in page and "0.75 s" in page
    assert "node node-1 is quarantined: workers have crashed there 3 times" in page


def test_status_of_a_waiting_run_names_the_reason(run: WrittenRun, capsys) -> None:
    write_lease(run)
    run.append_command(Waited("1 of at least 2 workers are ready"))
    status = status_json(capsys, run)
    assert status["phase"] == "waiting: 1 of at least 2 workers are ready"
    assert status["reason"] == "1 of at least 2 workers are ready"
    assert status["goodput"]["waiting_s"] > 20


def test_status_of_an_ended_run(run: WrittenRun, capsys) -> None:
    run.stop("failed", "w1 raised ValueError: no")
    write_lease(run, released=True)
    page = status_page(capsys, run)
    assert "first · failed: w1 raised ValueError: no" in page
    assert "\nended " in page and "w1  " not in page
    status = status_json(capsys, run)
    assert (status["outcome"], status["driver"], status["workers"]) == ("failed", None, [])
    assert status["goodput"]["wall_s"] == pytest.approx(30.85), (
        "the wall time of an ended run does not grow"
    )


@pytest.mark.parametrize("owner", [{"pid": 2**22 + 1}, {"host": "elsewhere", "age_s": 60.0}])
def test_status_of_a_run_whose_driver_died(run: WrittenRun, capsys, owner: dict[str, Any]) -> None:
    write_lease(run, **owner)
    page = status_page(capsys, run, "--watch")
    assert "first · not driven" in page
    assert "not driven, last line " in page and "use the same run name to resume it" in page
    assert status_json(capsys, run)["phase"] == "not driven"


def test_status_of_a_run_that_has_only_a_recipe(tmp_path: Path, capsys) -> None:
    new_run = WrittenRun(tmp_path / "first")
    (tmp_path / "first" / "recipe.json").write_text("{}")
    assert "first · not begun" in status_page(capsys, new_run)
    assert status_json(capsys, new_run)["goodput"]["goodput"] is None


def test_status_writes_no_files(run: WrittenRun, capsys) -> None:
    def files() -> dict[str, tuple[float, int]]:
        existing = (file for file in run.folder.path.parent.rglob("*") if file.is_file())
        return {str(file): (file.stat().st_mtime, file.stat().st_size) for file in existing}

    write_lease(run)
    before = files()
    status_page(capsys, run, "--json")
    status_page(capsys, run)
    assert files() == before


def test_unknown_run_is_refused_with_the_existing_ones(run: WrittenRun, capsys) -> None:
    for command in (("status", "second"), ("logs", "second", "--worker", "w0")):
        code, out, err = run_elastic(capsys, *command, "--storage", run.folder.storage)
        assert (code, out) == (2, "")
        assert "no run 'second'" in err and "its runs are: first" in err and err.count("\n") == 1


def test_prices_apply_to_all_nodes_or_to_a_type() -> None:
    assert parse_prices(["1.5", "gpu=2"]) == {"": 1.5, "gpu": 2.0}
    with pytest.raises(UserError, match="--price gpu"):
        parse_prices(["gpu=cheap"])


def test_worker_hours_are_priced(run: WrittenRun, capsys) -> None:
    page = status_page(capsys, run, "--price", "36", "--price", "node-1=0")
    usage = next(line for line in page.splitlines() if line.startswith("used"))
    cost = float(usage.rpartition(" ")[2])
    assert cost == pytest.approx(36 * 91.5 / 3600, abs=0.5)
    assert "node-1: " in page
    partly_priced = status_page(capsys, run, "--price", "node-1=1")
    assert "places without a price excluded" in partly_priced


def test_status_page_lists_at_most_40_of_many_workers_in_short_lines(
    tmp_path: Path, capsys
) -> None:
    large_run = WrittenRun(tmp_path / "first", now=time.time() - 60)
    (tmp_path / "first" / "recipe.json").write_text("{}")
    large_run.start(500)
    write_lease(large_run)
    page = status_page(capsys, large_run)
    assert "and 460 more: --json lists all" in page
    assert max(len(line) for line in page.splitlines()) <= 110


def test_logs_show_one_worker(run: WrittenRun, capsys) -> None:
    traceback = 'Traceback:\n  File "x.py", line 1\nValueError: boom'
    run.append_event(WorkerRaised("w1", 2, "program", "ValueError: boom", traceback))
    storage = DiskStorage(run.folder.path)
    storage.write("logs/w1.out", b":job_id:01000000\n:actor_name:RayWorker\nhello from w1\n")
    storage.write("logs/w1.err", b"")
    storage = ("--storage", run.folder.storage)
    code, out, err = run_elastic(capsys, "logs", "first", "--worker", "w1", *storage)
    assert (code, err) == (0, "")
    assert "w1 is ready on node-0 (pid 100)" in out and "w1 raised ValueError: boom" in out
    assert '  File "x.py", line 1' in out
    assert "-- standard output\nhello from w1\n-- standard error: empty\n" in out
    assert "job_id" not in out and "w0" not in out
    code, out, err = run_elastic(capsys, "logs", "first", "--worker", "w7", *storage)
    assert (code, out) == (2, "")
    assert "no worker 'w7'" in err and "w0, w1, w2, w3, w4" in err


def test_run_status_depends_only_on_the_given_time(run: WrittenRun) -> None:
    """A status of the past stays the same."""
    second_run = WrittenRun(run.folder.path.parent / "second")
    second_run.start(2)
    past_status = RunStatus(
        "second", "x", MIDNIGHT + 10, read_history(second_run.folder), {"pid": 1, "host": "a"}
    )
    assert past_status.split.wall_s == pytest.approx(10.0)
    assert past_status.phase == "training"
