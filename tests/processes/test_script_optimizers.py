"""Scripts with several or unusual optimizers equal the plain loop through deaths and newcomers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import optimizer_scripts
import pytest
import torch
from harness import Outcome, run_in_processes
from run_checks import assert_no_step_repeated
from test_script_habits import run_habit

from actors.controller.shell import Shell
from elastic.geometry.layout import Layout
from elastic.geometry.model_limits import Limits
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import Event, LayoutRequested, StepCommitted, StopRequested
from pipelines.loop import Run
from pipelines.loop.script import script_of
from pipelines.run.job import job_of
from pipelines.run.program import TrainingProgram

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["begins_late", "of_signs"])
def test_state_that_does_not_begin_with_zeros_is_sharded(name: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, f"train_{name}", layout="dp=2,fsdp=2", module=optimizer_scripts)
    layouts = [line["layout"] for line in run.lines_of("Resume")]
    assert len(set(layouts)) > 1 and any("fsdp" in layout for layout in layouts), layouts
    assert_as_plain(run, name)


def assert_as_plain(run: Outcome, name: str) -> None:
    """The losses, and the states of the optimizers that the script has saved itself."""
    losses, states = zip(
        *optimizer_scripts.plain_steps(getattr(optimizer_scripts, name)), strict=True
    )
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    files = {int(f.name.split("-")[1]): f for f in run.folder.glob("**/optimizers-*.pt")}
    assert [*sorted(files)] == [6, 12, 18, 24]
    for number, file in files.items():
        if name == "of_signs":
            continue  # a bias in front of BatchNorm has gradients of 0, with a sign by rounding
        saved = [state for _, state in sorted(torch.load(file).items())]
        for own, expected in zip(saved, states[number - 1], strict=True):
            torch.testing.assert_close(own["state"], expected["state"], rtol=1e-9, atol=1e-12)
            assert own["param_groups"] == expected["param_groups"]


def test_schedule_that_is_stepped_before_its_optimizer_counts_at_once(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "train_early_schedule", module=optimizer_scripts)
    losses = optimizer_scripts.plain_early_schedule()
    assert list(run.losses().values()) == pytest.approx(list(losses), rel=1e-9)


def test_clipping_by_norm_and_by_value_is_that_of_torch(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "train_clipped", module=optimizer_scripts)
    losses = optimizer_scripts.plain_clipped()
    assert list(run.losses().values()) == pytest.approx(list(losses), rel=1e-9)


WHOLE = [
    ("of_matrices", "dp=3"),
    ("of_matrices", "dp=2,fsdp=2"),
    ("of_matrices", "dp=2,fsdp=2,zero=1"),
    ("factored", "dp=2,fsdp=2"),
    ("factored", "dp=2,fsdp=2,zero=2"),
    ("preconditioned", "dp=2,fsdp=2"),
]


@pytest.mark.parametrize(("name", "layout"), WHOLE, ids=[f"{n} {layout}" for n, layout in WHOLE])
def test_optimizers_of_whole_matrices_equal_the_plain_loop(
    name: str, layout: str, tmp_path: Path
) -> None:
    run = run_habit(tmp_path, f"train_{name}", layout=layout, module=optimizer_scripts)
    layouts = {line["layout"] for line in run.lines_of("Resume")}
    axis = "fsdp" if "fsdp" in layout else "dp"
    assert len(layouts) > 1 and any(axis in used for used in layouts), layouts
    assert_as_plain(run, name)


def limits_of(train: Callable[[Run], None]) -> Limits:
    script = script_of(train)
    program = TrainingProgram(script.settings.model_dump(), device="cpu", recipe=script)
    return job_of(script.settings, program).limits


def test_whole_matrices_are_dealt_by_fsdp_and_not_cut_by_tp() -> None:
    limits = limits_of(optimizer_scripts.train_of_matrices)
    assert limits.refusal(Layout(dp=2)) is limits.refusal(Layout(fsdp=2)) is None
    refusal = limits.refusal(Layout(tp=2))
    assert refusal is not None and refusal.startswith("tp=2: the optimizer's update")


def test_optimizer_that_couples_parameters_is_not_sharded() -> None:
    limits = limits_of(optimizer_scripts.train_coupled)
    assert limits.refusal(Layout(dp=2)) is None
    refusal = limits.refusal(Layout(fsdp=2))
    assert refusal is not None and "depends on other parameters" in refusal


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        ("of_matrices", True),
        pytest.param("of_matrices", False, marks=pytest.mark.soak),
        pytest.param("factored", False, marks=pytest.mark.soak),
        ("preconditioned", False),
    ],
)
def test_owners_change_with_the_layout(name: str, offload: bool, tmp_path: Path) -> None:
    """And with the ZeRO stage; one worker reads the checkpoint that the owners wrote."""
    requested = ["dp=2,fsdp=2", "fsdp=3", "fsdp=4,zero=2", "dp=4", "fsdp=2,zero=1"]
    following: list[Event] = [
        *(LayoutRequested(layout, TargetLayout.parse(layout)) for layout in requested),
        StopRequested("a signal"),
    ]
    shells: list[Shell] = []

    def follow(event: Event) -> None:
        """Once a generation has committed a step, the next layout is requested, then the end."""
        generation = len(requested) + 2 - len(following)
        if isinstance(event, StepCommitted) and event.generation == generation and following:
            shells[0].post(following.pop(0))

    settings = script_of(getattr(optimizer_scripts, f"train_{name}")).settings
    settings = settings.model_copy(update={"offload": offload})
    recipe = f"{optimizer_scripts.__file__}:train_{name}"
    run = run_in_processes(
        tmp_path,
        settings,
        4,
        layout="fsdp=4",
        recipe=recipe,
        on_event=follow,
        on_shell=shells.append,
    )
    assert run.stopped.outcome == "interrupted", run.stopped
    run = run_in_processes(tmp_path, settings, 1, recipe=recipe)
    assert run.stopped.outcome == "completed", run.stopped
    layouts = [line["layout"] for line in run.lines_of("Resume")]
    assert layouts == ["fsdp=4", *requested, "dp=1"]
    losses = list(optimizer_scripts.plain_losses(getattr(optimizer_scripts, name)))
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    assert_no_step_repeated(run)
