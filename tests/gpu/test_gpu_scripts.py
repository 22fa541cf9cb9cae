"""Custom training loops on a GPU, through kills, equal the plain loop on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import gpu_scripts
import loops
import pytest
import script_habits
from harness import Outcome, run_in_processes
from one_gpu import NEEDS_GPU
from run_checks import assert_no_step_repeated

from elastic.geometry.layout import Layout
from pipelines.loop.script import script_of

pytestmark = NEEDS_GPU


def run_script(folder: Path, module: ModuleType, name: str, layout: str) -> Outcome:
    (marks := folder / "marks").mkdir()
    run = run_in_processes(
        folder,
        script_of(getattr(module, name)).settings,
        Layout.parse(layout).num_workers,
        layout=layout,
        program="one_gpu:program",
        recipe=f"{module.__file__}:{name}",
        environment={loops.FOLDER: str(marks)},
        collective_timeout_s=60.0,
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert_no_step_repeated(run)
    return run


def plain_losses() -> Iterator[float]:
    """On the CPU, in one process."""
    model, optimizer, loader = gpu_scripts.build()
    losses = loops.plain(model, optimizer, None, loader, loops.NUM_STEPS, loops.NUM_MICROBATCHES)
    for number in range(1, loops.NUM_STEPS + 1):
        optimizer.param_groups[0]["lr"] = gpu_scripts.rate_at(number)
        yield next(losses)


@pytest.mark.parametrize("layout", ["dp=3", "dp=2,fsdp=2"])
def test_script_that_moves_its_model_equals_the_cpu(layout: str, tmp_path: Path) -> None:
    run = run_script(tmp_path, gpu_scripts, "train", layout)
    assert len(run.lines_of("WorkerLost")) == 2
    assert run.losses() == pytest.approx(dict(enumerate(plain_losses(), start=1)), rel=1e-8)


def test_script_by_autocast_is_close_to_the_cpu(tmp_path: Path) -> None:
    run = run_script(tmp_path, gpu_scripts, "train_by_autocast", "dp=3")
    assert run.losses() == pytest.approx(dict(enumerate(plain_losses(), start=1)), rel=0.05)


def test_dropout_on_a_gpu_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    """Nor do a scheduler, momentum and the buffers of batch normalization."""
    runs = {}
    for layout in ("dp=1", "dp=3"):
        (folder := tmp_path / layout).mkdir()
        runs[layout] = run_script(folder, script_habits, "one_cycle", layout)
    assert runs["dp=3"].losses() == pytest.approx(runs["dp=1"].losses(), rel=1e-9)
    assert len(runs["dp=3"].lines_of("WorkerLost")) == 2
