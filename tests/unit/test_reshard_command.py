"""`elastic reshard` without a running controller: one line, exit code 2, at once."""

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
    run = WrittenRun(tmp_path / "first")
    (tmp_path / "first" / "recipe.json").write_text("{}")
    run.start(4)
    return run


def refuse_reshard(capsys: pytest.CaptureFixture[str], run: WrittenRun, *arguments: str) -> str:
    sys.argv = ["elastic", "reshard", *arguments, "--storage", run.folder.storage]
    with pytest.raises(SystemExit) as exited:
        main()
    output = capsys.readouterr()
    assert exited.value.code == 2, output
    [line] = output.err.splitlines()
    assert not output.out and "Traceback" not in line
    return line


def write_lease(run: WrittenRun, **owner: object) -> None:
    """Write a lease as if this process drove the run."""
    lease = run.folder.path / "lease"
    lease.mkdir()
    started = psutil.Process().create_time()
    body = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
    body |= owner
    (lease / "1-0").write_text(json.dumps(body))


def test_unknown_run_is_refused_with_the_existing_ones(run: WrittenRun, capsys) -> None:
    line = refuse_reshard(capsys, run, "second", "--layout", "dp=2")
    assert "second" in line and "first" in line and "--storage" in line


def test_invalid_layout_is_refused(run: WrittenRun, capsys) -> None:
    assert "whole number" in refuse_reshard(capsys, run, "first", "--layout", "dp=two")
    assert "not an axis" in refuse_reshard(capsys, run, "first", "--layout", "zp=2")


def test_ended_run_is_refused(run: WrittenRun, capsys) -> None:
    run.stop()
    write_lease(run, released=True)
    line = refuse_reshard(capsys, run, "first", "--layout", "dp=2")
    assert "not running (completed at step 0)" in line and "elastic train" in line


def test_killed_run_is_refused(run: WrittenRun, capsys) -> None:
    run.stop("interrupted")
    run.start(4)
    write_lease(run, pid=2**22 + 1)
    assert "not running (it was killed)" in refuse_reshard(capsys, run, "first", "--layout", "dp=2")


def test_silent_cluster_is_refused(run: WrittenRun, capsys) -> None:
    write_lease(run, cluster="127.0.0.1:1")
    line = refuse_reshard(capsys, run, "first", "--layout", "dp=2")
    assert "127.0.0.1:1 does not answer" in line
