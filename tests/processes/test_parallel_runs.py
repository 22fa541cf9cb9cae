"""Whole runs under the model axes, with a SIGKILL inside a group of each axis."""

from __future__ import annotations

from pathlib import Path

import pytest
from expected import expected
from harness import Outcome, run_in_processes
from run_checks import (
    assert_each_sample_once,
    assert_no_step_repeated,
    assert_survivors_kept,
)

from actors.runtime.fault_spec import Fault
from pipelines.run.recipes import tiny, tiny_moe
from pipelines.settings import DataSettings, TrainSettings

NUM_STEPS = 24
COMMON = {
    "data": DataSettings(source="random", seq_len=16),
    "dtype": "float64",
    "steps": NUM_STEPS,
}
DENSE = tiny().model_copy(update=COMMON)
MIXED = tiny_moe().model_copy(update=COMMON)


def assert_equals_plain_loop(run: Outcome, settings: TrainSettings) -> None:
    assert run.stopped.outcome == "completed", run.stopped
    losses_and_norms, _ = expected(settings, NUM_STEPS)
    losses, norms = zip(*losses_and_norms, strict=True)
    assert [run.losses()[step] for step in range(1, NUM_STEPS + 1)] == pytest.approx(
        losses, rel=1e-9
    )
    norm_of_step = {line["step"]: line["grad_norm"] for line in run.metrics}
    assert list(norm_of_step.values()) == pytest.approx(norms, rel=1e-9)


def with_recorded_samples(settings: TrainSettings, folder: Path) -> TrainSettings:
    return settings.model_copy(update={"record_samples": folder / "samples.jsonl"})


KILLS = {
    "tp": ("dp=2,tp=2", DENSE, Fault("kill", "w3", 8, "compute")),
    "pp": ("dp=2,pp=2", DENSE, Fault("kill", "w1", 8, "compute")),
    "a stage in apply": ("dp=2,pp=2", DENSE, Fault("kill", "w2", 8, "apply")),
    "cp": ("dp=2,cp=2", DENSE, Fault("kill", "w2", 8, "vote")),
    "ep": ("dp=2,fsdp=2,ep=2", MIXED, Fault("kill", "w0", 8, "compute")),
}

QUICK = ("pp",)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in KILLS]
)
def test_kill_inside_a_group_of_an_axis_changes_no_loss(name: str, tmp_path: Path) -> None:
    layout, settings, fault = KILLS[name]
    run = run_in_processes(
        tmp_path, with_recorded_samples(settings, tmp_path), 4, layout=layout, faults=(fault,)
    )
    assert_equals_plain_loop(run, settings)
    assert_no_step_repeated(run)
    assert_each_sample_once(run, settings.batch)
    assert_survivors_kept(run, {"w0", "w1", "w2", "w3"} - {fault.worker})
    assert [line["worker"] for line in run.lines_of("WorkerLost")] == [fault.worker]
