"""Scripts that leave their loop end the run as completed, and run on below it on one worker."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import leaving_scripts
import loops
import pytest
import script_habits
import torch
from harness import Outcome, run_in_processes
from test_script_habits import run_habit

from pipelines.loop.script import script_of

pytestmark = pytest.mark.slow

run_leaving = partial(run_habit, module=leaving_scripts)


def test_loop_that_only_some_workers_leave_is_refused(tmp_path: Path) -> None:
    run = run_leaving(tmp_path, "leave_on_own_loss", num_deaths=0, outcome="user_error")
    assert "some workers have left the loop and others not" in run.stopped.reason
    assert max(run.losses()) == leaving_scripts.STOP_STEP


@pytest.mark.parametrize(
    ("name", "last_step"),
    [
        ("break_before_commit", 8),
        ("held_iterator", leaving_scripts.STOP_STEP),
        ("die_below_loop", leaving_scripts.STOP_STEP),
        ("other_dies_below_loop", leaving_scripts.STOP_STEP),
    ],
)
def test_script_that_leaves_its_loop_while_workers_die_runs_on_below_it(
    name: str, last_step: int, tmp_path: Path
) -> None:
    run = run_leaving(tmp_path, name, num_deaths=1)
    losses = list(script_habits.plain_whole_model_losses())[:last_step]
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    files = list((tmp_path / "marks").glob("below-*.pt"))
    assert files and (len(files) == 1 or name == "held_iterator")
    expected = list(script_habits.plain_whole_model())[last_step - 1]
    for file in files:
        for key, value in torch.load(file).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["break_early", "stop_early"])
def test_script_ends_the_run_and_runs_on_below_its_loop_on_one_worker(
    name: str, tmp_path: Path
) -> None:
    run = run_leaving(tmp_path, name, num_deaths=1)
    losses = list(script_habits.plain_whole_model_losses())[: leaving_scripts.STOP_STEP]
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    [file] = (tmp_path / "marks").glob("below-*.pt")
    expected = list(script_habits.plain_whole_model())[leaving_scripts.STOP_STEP - 1]
    for key, value in torch.load(file).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)
    assert [path.name for path in (run.folder / "checkpoints").glob("step-*")]


def test_mistake_between_two_steps_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    run = run_leaving(tmp_path, "raise_between_steps", num_deaths=1, outcome="failed")
    assert "ValueError: a mistake between two steps" in run.stopped.reason
    assert 'raise ValueError("a mistake' in run.stopped.traceback
    assert max(run.losses()) == leaving_scripts.STOP_STEP


def test_resumed_run_has_what_the_script_had_changed_when_it_failed(tmp_path: Path) -> None:
    for outcome, last_step in (("failed", leaving_scripts.STOP_STEP), ("completed", 24)):
        run = run_again(tmp_path, "fails_behind_step")
        assert (run.stopped.outcome, run.stopped.step) == (outcome, last_step), run.stopped
    losses = list(leaving_scripts.plain_behind_step())
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    [file] = (tmp_path / "marks").glob("below-*.pt")
    assert torch.load(file)["rounds"] == loops.NUM_STEPS


def test_resumed_run_goes_on_below_a_loop_where_the_script_has_failed(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    for outcome, num_files in (("failed", 0), ("completed", 1), ("completed", 1)):
        run = run_again(tmp_path, "fails_below_loop")
        assert (run.stopped.outcome, run.stopped.step) == (outcome, leaving_scripts.STOP_STEP)
        assert len([*marks.glob("below-*.pt")]) == num_files
    assert "nothing to do" in run.stopped.reason
    [file] = marks.glob("below-*.pt")
    expected = list(script_habits.plain_whole_model())[leaving_scripts.STOP_STEP - 1]
    for key, value in torch.load(file).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)


def run_again(folder: Path, name: str) -> Outcome:
    (marks := folder / "marks").mkdir(exist_ok=True)
    return run_in_processes(
        folder,
        script_of(getattr(leaving_scripts, name)).settings,
        2,
        layout="fsdp=2",
        recipe=f"{leaving_scripts.__file__}:{name}",
        environment={loops.FOLDER: str(marks)},
    )
