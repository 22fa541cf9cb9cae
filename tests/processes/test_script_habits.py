"""What people's scripts do between two steps has the effect that it has in a plain loop."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import loops
import pytest
import script_habits
import torch
from harness import Outcome, run_in_processes
from run_checks import assert_no_step_repeated

from elastic.geometry.layout import Layout
from pipelines.loop.script import script_of

pytestmark = pytest.mark.slow


def run_habit(
    folder: Path,
    name: str,
    num_deaths: int = 2,
    outcome: str = "completed",
    layout: str = "dp=2,fsdp=2",
    module: ModuleType = script_habits,
    **options: Any,
) -> Outcome:
    """A run in which workers die and others join, so that the layout changes."""
    (marks := folder / "marks").mkdir(parents=True)
    run = run_in_processes(
        folder,
        script_of(getattr(module, name)).settings,
        Layout.parse(layout).num_workers,
        layout=layout,
        recipe=f"{module.__file__}:{name}",
        environment={loops.FOLDER: str(marks)},
        **options,
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
    run = run_habit(tmp_path, "layer_by_layer", layout="dp=3")
    losses, weights = zip(*script_habits.plain_layer_by_layer(), strict=True)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    files = list((tmp_path / "marks").glob("layer-*.pt"))
    assert files
    for file in files:
        weight = weights[int(file.name.split("-")[1]) - 1]
        torch.testing.assert_close(torch.load(file)["weight"], weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("zero", "outcome"), [(2, "completed"), (3, "user_error")])
def test_layers_that_are_sharded_are_called_by_the_whole_model(
    zero: int, outcome: str, tmp_path: Path
) -> None:
    layout = f"dp=2,fsdp=2,zero={zero}"
    run = run_habit(tmp_path, "layer_by_layer", 2 * (zero == 2), outcome, layout)
    assert zero == 2 or "call the whole model, or train with --layout dp" in run.stopped.reason


def test_gradient_of_a_gradient_needs_whole_weights(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "second_order", 0, "user_error", "fsdp=2,zero=3")
    assert "differentiates a gradient (create_graph)" in run.stopped.reason
    assert "train with --layout dp, or zero=2" in run.stopped.reason


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


def test_reports_are_averaged_over_the_workers(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "reports")
    lost_at = {line["step"] + 1 for line in run.lines_of("Resume")}
    reported = {row["step"]: row["reported"] for row in run.metrics if "reported" in row}
    assert set(range(1, loops.NUM_STEPS + 1)) - reported.keys() <= lost_at
    read = {step: [] for step in range(1, loops.NUM_STEPS + 1)}
    for file in (tmp_path / "marks").glob("reported-*.pt"):
        values = {name: float(value) for name, value in torch.load(file).items()}
        read[int(file.name.split("-")[1])].append(values)
    assert [len(read[step]) for step in (2, 4, 6)] == [1, 1, 1] and len(read[1]) == 4
    for step, expected in enumerate(script_habits.plain_reports(), start=1):
        assert reported.get(step, expected) == pytest.approx(expected, rel=1e-9), step
        for values in read[step] if step not in lost_at else ():
            assert values == pytest.approx(expected, rel=1e-6), step
