"""After a hang one line names the worker that made the others wait, and where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_in_processes

from actors.runtime.fault_spec import Fault
from actors.storage.storage import DiskStorage
from pipelines.observe.history.history import read_history
from pipelines.observe.history.run_folder import RunFolder
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

SETTINGS = tiny().model_copy(
    update={"data": DataSettings(source="random", seq_len=16), "steps": 24}
)


@pytest.mark.slow
def test_hanging_worker_is_named(tmp_path: Path) -> None:
    line = hang_line(tmp_path, faults=(Fault("hang", "w1", 20, "compute"),))
    [trace] = (tmp_path / "traces").glob("*-w0.txt")
    assert "replica [0, 1, 2]: " in trace.read_text()
    assert line.startswith("hang: w1 (world rank 1) had not begun all_reduce number ")
    assert "of replica, in which w0, w2 waited; w1 computed in at (runtime/faults.py:" in line


@pytest.mark.slow
def test_skipped_collective_is_named_with_its_worker(tmp_path: Path) -> None:
    """Worker 1 does not take part in one reduction of gradients, and waits in the vote."""
    line = hang_line(tmp_path, program="mistaken_programs:skips_a_reduction")
    assert line.startswith("hang: w1 (world rank 1) had not begun all_reduce number ")
    assert "of replica, in which w0, w2 waited; w1 waited in all_reduce number " in line
    assert " of world in " in line


@pytest.mark.slow
def test_slow_worker_that_counts_as_hanging_is_named(tmp_path: Path) -> None:
    """The worker computes in the user's code for longer than the hang timeout."""
    line = hang_line(tmp_path, program="mistaken_programs:takes_long_once")
    assert "w1 (world rank 1) had not begun" in line
    assert "w1 computed in take_long (processes/mistaken_programs.py:" in line


def hang_line(folder: Path, **changes: Any) -> str:
    """Run three workers, of which one hangs once; what the history of the run says about it."""
    run = run_in_processes(folder, SETTINGS, 3, layout="dp=3", hang_timeout_s=2.0, **changes)
    assert run.stopped.outcome == "completed", run.stopped
    membership = read_history(RunFolder(DiskStorage(folder))).membership
    [hang] = [run_event for run_event in membership.run_events if run_event.kind == "hang"]
    return hang.text
