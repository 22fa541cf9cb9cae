"""Scripts with several or unusual optimizers equal the plain loop through deaths and newcomers."""

from __future__ import annotations

from pathlib import Path

import optimizer_scripts
import pytest
from test_script_habits import run_habit

from elastic.geometry.layout import Layout
from pipelines.loop.script import script_of
from pipelines.run.job import job_of
from pipelines.run.program import TrainingProgram


@pytest.mark.parametrize("name", ["begins_late", "of_signs"])
def test_state_that_does_not_begin_with_zeros_is_sharded(name: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, f"train_{name}", layout="dp=2,fsdp=2", module=optimizer_scripts)
    layouts = [line["layout"] for line in run.lines_of("Resume")]
    assert len(set(layouts)) > 1 and any("fsdp" in layout for layout in layouts), layouts
    losses = optimizer_scripts.plain_losses(getattr(optimizer_scripts, name))
    assert list(run.losses().values()) == pytest.approx(list(losses), rel=1e-9)


@pytest.mark.parametrize("name", ["of_matrices", "factored"])
def test_optimizers_of_whole_matrices_train_on_dp(name: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, f"train_{name}", layout="dp=3", module=optimizer_scripts)
    losses = optimizer_scripts.plain_losses(getattr(optimizer_scripts, name))
    assert list(run.losses().values()) == pytest.approx(list(losses), rel=1e-9)


def test_optimizers_of_whole_matrices_refuse_to_be_sharded() -> None:
    script = script_of(optimizer_scripts.train_of_matrices)
    program = TrainingProgram(script.settings.model_dump(), device="cpu", recipe=script)
    limits = job_of(script.settings, program).limits
    assert limits.refusal(Layout(dp=2)) is None
    for axis in ("fsdp", "tp"):
        refusal = limits.refusal(Layout(**{axis: 2}))
        assert refusal is not None and refusal.startswith(f"{axis}=2: the optimizer's update")
