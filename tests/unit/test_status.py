"""`elastic status` and `elastic logs` of runs in progress, ended runs and runs without a driver."""

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
from elastic.protocol.commands import NodeQuarantined, StartWorkers, Waited
from elastic.protocol.events import Checkpointed, ComputeTimed, WorkerRaised
from pipelines.cli import main
from pipelines.observe.history.history import read_history
from pipelines.observe.history.history_file import load_history
from pipelines.observe.sidecar.run_metrics import metrics_of
from pipelines.observe.view.status import parse_prices
from pipelines.observe.view.status_report import RunStatus
from pipelines.settings.errors import UserError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WrittenRun:
    """A run of one minute: sixty steps, a lost, a standby and a starting worker."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    written = WrittenRun(tmp_path / "first", now=time.time() - 60)
    (tmp_path / "first" / "recipe.json").write_text("{}")
    written.start(3, steps=100)
    for number in range(60):
        written.commit(loss=5 - number / 20, step_s=0.5)
    written.hear(Checkpointed(60, 1, "checkpoints/step-00000060-g1"))
    written.lose("w2", "connection reset")
    written.now += 0.25
    written.resume("w1", "w0")
    written.commit(loss=2.0)
    written.ready("w3", "node-1")
    written.tell(StartWorkers(("w4",)))
    return written


def drive(run: WrittenRun, age_s: float = 0.0, **owner: object) -> None:
    """Write a lease, as if this process drove the run."""
    lease = run.folder.path / "lease"
    lease.mkdir(exist_ok=True)
    started = psutil.Process().create_time()
    body = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
    body |= {"cluster": "", **owner}
    (lease / "1-0").write_text(json.dumps(body))
    os.utime(lease / "1-0", (time.time() - age_s,) * 2)


def elastic(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    sys.argv = ["elastic", *arguments]
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def page_of(capsys: pytest.CaptureFixture[str], run: WrittenRun, *arguments: str) -> str:
    code, out, err = elastic(capsys, "status", "first", "--storage", run.folder.storage, *arguments)
    assert (code, err) == (0, "")
    return out


def object_of(capsys: pytest.CaptureFixture[str], run: WrittenRun) -> dict[str, Any]:
    [line] = page_of(capsys, run, "--json").splitlines()
    return json.loads(line)


@pytest.mark.parametrize(
    ("kind", "unit"), [("own", "samples"), ("mlp", "samples"), ("transformer", "tokens")]
)
def test_speed_counts_samples_or_tokens_by_model(
    run: WrittenRun, capsys, kind: str, unit: str
) -> None:
    recipe = {"settings": {"model": {"kind": kind}}}
    (run.folder.path / "recipe.json").write_text(json.dumps(recipe))
    assert f" {unit}/s, " in page_of(capsys, run)
    assert object_of(capsys, run)["unit"] == unit
    followed = load_history(run.folder)
    followed.follow()
    values = {metric.name: metric.value for metric in metrics_of(followed.history, run.now)}
    assert (values["elastic_samples_per_s"] is None) == (unit == "tokens")


def test_a_run_that_goes_on(run: WrittenRun, capsys) -> None:
    drive(run, cluster="10.0.0.1:6379")
    page = page_of(capsys, run)
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


def test_json_tells_the_same(run: WrittenRun, capsys) -> None:
    drive(run)
    told = object_of(capsys, run)
    assert (told["phase"], told["outcome"], told["step"]) == ("training", None, 61)
    assert [(w["worker"], w["role"], w["world_rank"]) for w in told["workers"]] == [
        ("w1", "member", 0),
        ("w0", "member", 1),
        ("w3", "spare", None),
        ("w4", "starting", None),
    ]
    assert told["driver"]["pid"] == os.getpid()
    assert told["checkpoint"]["step"] == 60
    parts = told["goodput"]
    spent = sum(parts[f"{name}_s"] for name in ("compute", "redone", "paused", "waiting"))
    assert parts["wall_s"] == pytest.approx(spent) == pytest.approx(60, abs=30)
    hours = {row["place"]: row["hours"] * 3600 for row in told["worker_hours"]}
    assert hours["node-0"] == pytest.approx(60 + 60 + 30.5, abs=60)
    assert hours["node-1"] == pytest.approx(29, abs=30)


def test_slow_workers_and_avoided_nodes_are_shown(run: WrittenRun, capsys) -> None:
    drive(run)
    run.append_event(ComputeTimed(2, 61, (0.25, 0.75)))
    run.append_command(NodeQuarantined("node-1", time.time() + 3600, "workers have crashed there 3 times"))
    told = object_of(capsys, run)
    assert [w["compute_s"] for w in told["workers"]] == [0.25, 0.75, None, None]
    assert [row["node"] for row in told["quarantined_nodes"]] == ["node-1"]
    page = page_of(capsys, run)
    assert "node node-1, for " in page and "0.75 s" in page
    assert "node node-1 is quarantined: workers have crashed there 3 times" in page


def test_a_run_that_waits_says_what_for(run: WrittenRun, capsys) -> None:
    drive(run)
    run.append_command(Waited("1 of at least 2 workers are ready"))
    told = object_of(capsys, run)
    assert told["phase"] == "waiting: 1 of at least 2 workers are ready"
    assert told["reason"] == "1 of at least 2 workers are ready"
    assert told["goodput"]["waiting_s"] > 20


def test_a_run_that_has_ended(run: WrittenRun, capsys) -> None:
    run.stop("failed", "w1 raised ValueError: no")
    drive(run, released=True)
    page = page_of(capsys, run)
    assert "first · failed: w1 raised ValueError: no" in page
    assert "\nended " in page and "w1  " not in page
    told = object_of(capsys, run)
    assert (told["outcome"], told["driver"], told["workers"]) == ("failed", None, [])
    assert told["goodput"]["wall_s"] == pytest.approx(30.85), "a run that has ended gets no older"


@pytest.mark.parametrize("owner", [{"pid": 2**22 + 1}, {"host": "elsewhere", "age_s": 60.0}])
def test_a_run_whose_driver_has_died(run: WrittenRun, capsys, owner: dict[str, Any]) -> None:
    drive(run, **owner)
    page = page_of(capsys, run, "--watch")
    assert "first · not driven" in page
    assert "not driven, last line " in page and "use the same run name to resume it" in page
    assert object_of(capsys, run)["phase"] == "not driven"


def test_a_run_that_has_only_a_recipe(tmp_path: Path, capsys) -> None:
    written = WrittenRun(tmp_path / "first")
    (tmp_path / "first" / "recipe.json").write_text("{}")
    assert "first · not begun" in page_of(capsys, written)
    assert object_of(capsys, written)["goodput"]["goodput"] is None


def test_nothing_is_written(run: WrittenRun, capsys) -> None:
    def files() -> dict[str, tuple[float, int]]:
        found = (file for file in run.folder.path.parent.rglob("*") if file.is_file())
        return {str(file): (file.stat().st_mtime, file.stat().st_size) for file in found}

    drive(run)
    before = files()
    page_of(capsys, run, "--json")
    page_of(capsys, run)
    assert files() == before


def test_a_run_that_is_not_there(run: WrittenRun, capsys) -> None:
    for command in (("status", "second"), ("logs", "second", "--worker", "w0")):
        code, out, err = elastic(capsys, *command, "--storage", run.folder.storage)
        assert (code, out) == (2, "")
        assert "no run 'second'" in err and "its runs are: first" in err and err.count("\n") == 1


def test_prices_are_of_all_nodes_or_of_a_type() -> None:
    assert parse_prices(["1.5", "gpu=2"]) == {"": 1.5, "gpu": 2.0}
    with pytest.raises(UserError, match="--price gpu"):
        parse_prices(["gpu=cheap"])


def test_worker_hours_are_priced(run: WrittenRun, capsys) -> None:
    page = page_of(capsys, run, "--price", "36", "--price", "node-1=0")
    told = next(line for line in page.splitlines() if line.startswith("used"))
    cost = float(told.rpartition(" ")[2])
    assert cost == pytest.approx(36 * 91.5 / 3600, abs=0.5)
    assert "node-1: " in page
    partly = page_of(capsys, run, "--price", "node-1=1")
    assert "places without a price excluded" in partly


def test_many_workers_are_cut_short_and_lines_are_not_overlong(tmp_path: Path, capsys) -> None:
    written = WrittenRun(tmp_path / "first", now=time.time() - 60)
    (tmp_path / "first" / "recipe.json").write_text("{}")
    written.start(500)
    drive(written)
    page = page_of(capsys, written)
    assert "and 460 more: --json lists all" in page
    assert max(len(line) for line in page.splitlines()) <= 110


def test_logs_tell_of_one_worker(run: WrittenRun, capsys) -> None:
    boom = 'Traceback:\n  File "x.py", line 1\nValueError: boom'
    run.append_event(WorkerRaised("w1", 2, "program", "ValueError: boom", boom))
    kept = DiskStorage(run.folder.path)
    kept.write("logs/w1.out", b":job_id:01000000\n:actor_name:RayWorker\nhello from w1\n")
    kept.write("logs/w1.err", b"")
    storage = ("--storage", run.folder.storage)
    code, out, err = elastic(capsys, "logs", "first", "--worker", "w1", *storage)
    assert (code, err) == (0, "")
    assert "w1 is ready on node-0 (pid 100)" in out and "w1 raised ValueError: boom" in out
    assert '  File "x.py", line 1' in out
    assert "-- standard output\nhello from w1\n-- standard error: empty\n" in out
    assert "job_id" not in out and "w0" not in out
    code, out, err = elastic(capsys, "logs", "first", "--worker", "w7", *storage)
    assert (code, out) == (2, "")
    assert "no worker 'w7'" in err and "w0, w1, w2, w3, w4" in err


def test_a_standing_needs_no_clock_of_its_own(run: WrittenRun) -> None:
    """The page depends on `now` only: a page of the past stays the same."""
    written = WrittenRun(run.folder.path.parent / "second")
    written.start(2)
    from_then = RunStatus(
        "second", "x", MIDNIGHT + 10, read_history(written.folder), {"pid": 1, "host": "a"}
    )
    assert from_then.split.wall_s == pytest.approx(10.0)
    assert from_then.phase == "training"
