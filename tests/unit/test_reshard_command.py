"""`elastic reshard` where there is nobody to ask: one line, exit code 2, and quickly."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest
from written_runs import WrittenRun

from pipelines.cli import main


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WrittenRun:
    monkeypatch.setattr(sys, "argv", sys.argv)
    written = WrittenRun(tmp_path / "first")
    (tmp_path / "first" / "recipe.json").write_text("{}")
    written.start(4)
    return written


def refused(capsys: pytest.CaptureFixture[str], run: WrittenRun, *arguments: str) -> str:
    sys.argv = ["elastic", "reshard", *arguments, "--storage", run.folder.storage]
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2, told
    [line] = told.err.splitlines()
    assert not told.out and "Traceback" not in line
    return line


def drive(run: WrittenRun, **owner: object) -> None:
    """As if this process drove the run."""
    lease = run.folder.path / "lease"
    lease.mkdir()
    started = psutil.Process().create_time()
    body = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
    body |= owner
    (lease / "1-0").write_text(json.dumps(body))


def test_a_run_that_is_not_there(run: WrittenRun, capsys) -> None:
    line = refused(capsys, run, "second", "--layout", "dp=2")
    assert "second" in line and "first" in line and "--storage" in line


def test_a_layout_that_is_none(run: WrittenRun, capsys) -> None:
    assert "whole number" in refused(capsys, run, "first", "--layout", "dp=two")
    assert "not an axis" in refused(capsys, run, "first", "--layout", "zp=2")


def test_a_run_that_has_ended(run: WrittenRun, capsys) -> None:
    run.stop()
    drive(run, released=True)
    line = refused(capsys, run, "first", "--layout", "dp=2")
    assert "not running (completed at step 0)" in line and "elastic train" in line


def test_a_run_that_was_killed(run: WrittenRun, capsys) -> None:
    run.stop("interrupted")
    run.start(4)
    drive(run, pid=2**22 + 1)
    assert "not running (it was killed)" in refused(capsys, run, "first", "--layout", "dp=2")


def test_a_cluster_that_does_not_answer(run: WrittenRun, capsys) -> None:
    drive(run, cluster="127.0.0.1:1")
    line = refused(capsys, run, "first", "--layout", "dp=2")
    assert "127.0.0.1:1 does not answer" in line
