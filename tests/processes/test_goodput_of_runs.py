"""Goodput of a real run with a real SIGKILL."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_plainly

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
def test_the_parts_of_a_run_that_fell_back_are_those_of_its_files(tmp_path: Path) -> None:
    """No other worker has the dead worker's shard: the run rolls back to a checkpoint."""
    faults = (Fault("kill", "w1", 38, "compute"),)
    run = run_plainly(
        tmp_path / "run", SETTINGS, 2, layout="fsdp=2", faults=faults, snapshot_every=0
    )
    assert run.stopped.outcome == "completed", run.stopped
    history = read_history(RunFolder.of(tmp_path, "run"))
    split, metrics = history.account.split(), run.metrics
    begun = run.told("RunOpened")[0]["time"]
    assert split.wall_s == pytest.approx(run.told("Stopped")[0]["time"] - begun, abs=1e-3)
    assert split.undriven_s == 0.0

    [rolled_back] = run.told("RolledBack")
    redone = {row["step"]: row for row in metrics if row["generation"] == 1}
    redone = {step: row for step, row in redone.items() if step > rolled_back["step"]}
    assert 37 in redone
    stands = {row["step"]: row for row in metrics}
    for told_s, rows in ((split.redone_s, redone), (split.compute_s, stands)):
        step_s = sum(row["step_s"] for row in rows.values())
        assert told_s == pytest.approx(step_s, rel=0.25, abs=0.3)
    first = run.told("Resume")[0]["time"] - begun
    assert first <= split.waiting_s + 0.2, "until the first step it is starting"
    [abort, resumed] = run.told("Abort")[0]["time"], run.told("Resume")[1]["time"]
    assert split.paused_s >= resumed - abort - 0.01
    hours_s = history.account.workers.by_place()["this-machine"]
    assert 2 * split.compute_s * 0.5 < hours_s < 2 * split.wall_s


def test_readings_end_with_the_run(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"steps": 3, "checkpoint": CheckpointSettings(every=0)})
    run_plainly(tmp_path / "run", settings, 1)
    history = read_history(RunFolder.of(tmp_path, "run"))
    assert history.account.readings[-1].step == 3
    assert history.account.readings[-1].split == history.account.split()
