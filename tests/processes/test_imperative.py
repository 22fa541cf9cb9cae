"""Custom training loops: they repeat a step after a worker dies, and equal the plain loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import loops
import pytest
import torch
from harness import Outcome, run_in_processes
from run_checks import assert_no_step_repeated, assert_survivors_kept

from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.loop.script import script_of

SCRIPT = f"{loops.__file__}:"


def run_loop(folder: Path, name: str = "train", workers: int = 3, **options: object) -> Outcome:
    (marks := folder / "marks").mkdir()
    settings = script_of(getattr(loops, name)).settings
    environment = {loops.FOLDER: str(marks)}
    return run_in_processes(
        folder, settings, workers, recipe=SCRIPT + name, environment=environment, **options
    )


@cache
def plain_losses() -> dict[int, float]:
    losses = loops.plain(*loops.build_training(), loops.NUM_STEPS, loops.NUM_MICROBATCHES)
    return dict(enumerate(losses, start=1))


@pytest.mark.parametrize(
    "name", ["train_with_readers", pytest.param("train", marks=pytest.mark.slow)]
)
def test_deaths_and_a_reshard_do_not_change_the_losses_of_a_custom_loop(
    name: str, tmp_path: Path
) -> None:
    """Surviving workers get the step again within the same call of the function."""
    due = ((19, LayoutRequested("shards", TargetLayout.parse("fsdp=2"))),)
    run = run_loop(tmp_path, name, layout="dp=4", workers=4, due=due)
    assert run.stopped.outcome == "completed", run.stopped
    assert run.losses() == pytest.approx(plain_losses(), rel=1e-9)
    assert_no_step_repeated(run)
    assert len(run.lines_of("WorkerLost")) == 2
    assert_survivors_kept(run, {"w0"})
    [pid] = [line["pid"] for line in run.lines_of("WorkerReady") if line["worker"] == "w0"]
    numbers = (tmp_path / "marks" / f"steps-{pid}").read_text().split()
    steps = [int(step) for step in numbers]
    assert sorted(set(steps)) == list(range(1, loops.NUM_STEPS + 1))
    assert [steps.count(step) for step in loops.KILLED] == [2, 2]
    readers = list((tmp_path / "marks").glob("reader-*"))
    assert len(readers) >= 8 if name == "train_with_readers" else not readers


@pytest.mark.slow
def test_loop_with_a_plan_trains_under_tp_as_one_process(tmp_path: Path) -> None:
    """With dropout of a sharded activation; its state_dict has the whole weights."""
    due = ((12, LayoutRequested("shards", TargetLayout.parse("fsdp=2"))),)
    run = run_loop(tmp_path, "train_planned", layout="tp=2", workers=2, due=due)
    assert run.stopped.outcome == "completed", run.stopped
    assert [line["layout"] for line in run.lines_of("Resume")] == ["tp=2", "fsdp=2"]
    model, optimizer, loader = loops.build_wide()
    plain = loops.plain(model, optimizer, None, loader, loops.NUM_STEPS, loops.NUM_MICROBATCHES)
    assert list(run.losses().values()) == pytest.approx(list(plain), rel=1e-9)
    weights = torch.load(tmp_path / "marks" / "weights.pt")
    torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_step_with_a_suppressed_failure_is_not_committed(tmp_path: Path) -> None:
    run = run_loop(tmp_path, "train_suppressing_exceptions", layout="dp=2,fsdp=2", workers=4)
    assert run.stopped.outcome == "completed", run.stopped
    assert run.losses() == pytest.approx(plain_losses(), rel=1e-9)
    assert_no_step_repeated(run)
    assert len(run.lines_of("WorkerLost")) == 1


@pytest.mark.slow
def test_exception_of_the_script_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    run = run_loop(tmp_path, "train_and_raise", workers=2)
    assert run.stopped.outcome == "failed"
    assert "ValueError: the script's own mistake" in run.stopped.reason
    assert 'raise ValueError("the script' in run.stopped.traceback
    assert len(run.metrics) == loops.KILLED[0] - 1


def test_declaration_has_the_settings_of_the_loop() -> None:
    settings = script_of(loops.train).settings
    assert (settings.batch, settings.microbatch, settings.steps) == (24, 4, 24)
    assert settings.dtype == "float64"
    assert replace(script_of(loops.train)).function is loops.train
    assert settings.reading.num_readers == 0
    reading = script_of(loops.train_with_readers).settings.reading
    assert (reading.num_readers, reading.prefetch_factor, reading.pin_memory) == (2, 2, False)
