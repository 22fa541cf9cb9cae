"""Goodput of a real run with a real SIGKILL."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_in_processes

from actors.runtime.fault_spec import Fault
from pipelines.observe.history.history import read_history
from pipelines.observe.history.run_folder import RunFolder
from pipelines.run.recipes import tiny
from pipelines.settings import CheckpointSettings, DataSettings

SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "steps": 60,
        "eval_every": 0,
        "checkpoint": CheckpointSettings(every=10),
    }
)


@pytest.mark.slow
def test_goodput_of_a_rolled_back_run_agrees_with_its_files(tmp_path: Path) -> None:
    """No other worker has the dead worker's shard: the run rolls back to a checkpoint."""
    faults = (Fault("kill", "w1", 38, "compute"),)
    run = run_in_processes(
        tmp_path / "run", SETTINGS, 2, layout="fsdp=2", faults=faults, snapshot_every=0
    )
    assert run.stopped.outcome == "completed", run.stopped
    history = read_history(RunFolder.of(tmp_path, "run"))
    split, metrics = history.account.split(), run.metrics
    start = run.lines_of("RunOpened")[0]["time"]
    assert split.wall_s == pytest.approx(run.lines_of("Stopped")[0]["time"] - start, abs=1e-3)
    assert split.undriven_s == 0.0

    [rolled_back] = run.lines_of("RolledBack")
    repeated = {row["step"]: row for row in metrics if row["generation"] == 1}
    repeated = {step: row for step, row in repeated.items() if step > rolled_back["step"]}
    assert 37 in repeated
    committed = {row["step"]: row for row in metrics}
    for reported_s, rows in ((split.redone_s, repeated), (split.compute_s, committed)):
        step_s = sum(row["step_s"] for row in rows.values())
        assert reported_s == pytest.approx(step_s, rel=0.25, abs=0.3)
    startup_s = run.lines_of("Resume")[0]["time"] - start
    assert startup_s <= split.waiting_s + 0.2, "the run starts until its first step"
    [aborted_at, resumed_at] = run.lines_of("Abort")[0]["time"], run.lines_of("Resume")[1]["time"]
    assert split.paused_s >= resumed_at - aborted_at - 0.01
    worker_s = history.account.workers.by_place()["this-machine"]
    assert 2 * split.compute_s * 0.5 < worker_s < 2 * split.wall_s


def test_last_goodput_reading_is_of_the_end_of_the_run(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"steps": 3, "checkpoint": CheckpointSettings(every=0)})
    run_in_processes(tmp_path / "run", settings, 1)
    history = read_history(RunFolder.of(tmp_path, "run"))
    assert history.account.readings[-1].step == 3
    assert history.account.readings[-1].split == history.account.split()
