"""What people's scripts do between two steps has the effect that it has in a plain loop."""

from __future__ import annotations

from pathlib import Path

import loops
import pytest
import script_habits
import torch
from harness import Outcome, run_in_processes
from run_checks import assert_no_step_repeated

from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.loop.script import script_of


def run_habit(
    folder: Path,
    name: str,
    num_deaths: int = 2,
    target: str | None = "fsdp=3",
    outcome: str = "completed",
) -> Outcome:
    """A run in which workers die, others join, and the layout may change."""
    (marks := folder / "marks").mkdir()
    due = ((11, LayoutRequested("shards", TargetLayout.parse(target))),) if target else ()
    run = run_in_processes(
        folder,
        script_of(getattr(script_habits, name)).settings,
        3,
        layout="dp=3",
        recipe=f"{script_habits.__file__}:{name}",
        environment={loops.FOLDER: str(marks)},
        due=due,
    )
    assert run.stopped.outcome == outcome, run.stopped
    assert_no_step_repeated(run)
    assert len(run.lines_of("WorkerLost")) == num_deaths
    return run


@pytest.mark.parametrize("name", list(script_habits.PLAIN))
def test_hyperparameters_follow_the_script_through_deaths_and_a_reshard(
    name: str, tmp_path: Path
) -> None:
    run = run_habit(tmp_path, name)
    expected = dict(enumerate(script_habits.PLAIN[name](), start=1))
    assert run.losses() == pytest.approx(expected, rel=1e-9)


def test_script_uses_its_whole_model_between_steps(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "whole_model")
    expected = list(script_habits.plain_whole_model())
    files = list((tmp_path / "marks").glob("*.pt"))
    moments = {tuple(file.name.split("-")[:2]) for file in files}
    every = range(script_habits.EVERY, loops.NUM_STEPS + 1, script_habits.EVERY)
    assert moments >= {("first", str(number)) for number in every}
    assert moments >= {("copy", str(number)) for number in every}
    assert moments >= {("before", str(number)) for number in every[:-1]}
    for file in files:
        number = int(file.name.split("-")[1])
        values = torch.load(file)
        assert values.keys() == expected[number - 1].keys()
        for name, value in values.items():
            torch.testing.assert_close(value, expected[number - 1][name], rtol=1e-9, atol=1e-12)
    assert len([file for file in files if file.name.startswith("first")]) == len(every)
    assert run.losses()


def test_worker_asks_once_whether_it_is_the_first(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "first_only")
    expected = list(script_habits.plain_whole_model())
    files = list((tmp_path / "marks").glob("first-*.pt"))
    assert len(files) == loops.NUM_STEPS // script_habits.EVERY
    for file in files:
        values = expected[int(file.name.split("-")[1]) - 1]
        for name, value in torch.load(file).items():
            torch.testing.assert_close(value, values[name], rtol=1e-9, atol=1e-12)
    assert len(run.losses()) == loops.NUM_STEPS


def test_layers_of_a_container_are_those_that_are_trained(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "layer_by_layer")
    losses, weights = zip(*script_habits.plain_layer_by_layer(), strict=True)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    files = list((tmp_path / "marks").glob("layer-*.pt"))
    assert files
    for file in files:
        weight = weights[int(file.name.split("-")[1]) - 1]
        torch.testing.assert_close(torch.load(file)["weight"], weight, rtol=1e-9, atol=1e-12)


def test_loop_that_only_some_workers_leave_is_refused(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "leave_on_own_loss", num_deaths=0, target=None, outcome="failed")
    assert "some workers have left the loop and others not" in run.stopped.reason
    assert max(run.losses()) == script_habits.STOP_STEP


@pytest.mark.parametrize(
    ("name", "last_step"),
    [
        ("break_before_commit", 8),
        ("held_iterator", script_habits.STOP_STEP),
        ("die_below_loop", script_habits.STOP_STEP),
        ("other_dies_below_loop", script_habits.STOP_STEP),
    ],
)
def test_script_that_leaves_its_loop_while_workers_die_runs_on_below_it(
    name: str, last_step: int, tmp_path: Path
) -> None:
    run = run_habit(tmp_path, name, num_deaths=1, target=None)
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
    run = run_habit(tmp_path, name, num_deaths=1, target=None)
    losses = list(script_habits.plain_whole_model_losses())[: script_habits.STOP_STEP]
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    [file] = (tmp_path / "marks").glob("below-*.pt")
    expected = list(script_habits.plain_whole_model())[script_habits.STOP_STEP - 1]
    for key, value in torch.load(file).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)
    assert [path.name for path in (run.folder / "checkpoints").glob("step-*")]


def test_mistake_between_two_steps_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "raise_between_steps", num_deaths=1, target=None, outcome="failed")
    assert "ValueError: a mistake between two steps" in run.stopped.reason
    assert 'raise ValueError("a mistake' in run.stopped.traceback
    assert max(run.losses()) == script_habits.STOP_STEP


def test_loss_scale_is_part_of_the_state_and_an_overflow_has_no_effect(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "loss_scaler")
    expected = dict(enumerate(script_habits.plain_loss_scaler(), start=1))
    del expected[script_habits.OVERFLOW_STEP]
    losses = run.losses()
    assert losses.pop(script_habits.OVERFLOW_STEP) is None
    assert losses == pytest.approx(expected, rel=1e-9)
    scales = dict(enumerate(script_habits.plain_scales(), start=1))
    files = list((tmp_path / "marks").glob("scale-*.pt"))
    for file in files:
        assert float(torch.load(file)["scale"]) == scales[int(file.name.split("-")[1])]
    assert len(files) == len(scales)


def test_autocast_in_the_body_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "autocast")
    expected = dict(enumerate(script_habits.plain_autocast(), start=1))
    assert run.losses() == pytest.approx(expected, rel=1e-2)
