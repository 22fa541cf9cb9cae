"""Custom training loops on a GPU, through kills, equal the plain loop on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import gpu_scripts
import loops
import pytest
import script_habits
from harness import Outcome
from one_gpu import NEEDS_GPU
from test_script_habits import run_habit

pytestmark = NEEDS_GPU


def run_on_gpu(
    folder: Path, module: ModuleType, name: str, layout: str, num_deaths: int = 2
) -> Outcome:
    options = {"program": "one_gpu:program", "collective_timeout_s": 60.0}
    return run_habit(folder, name, num_deaths, layout=layout, module=module, **options)


def plain_losses() -> Iterator[float]:
    """On the CPU, in one process."""
    model, optimizer, loader = gpu_scripts.build()
    losses = loops.plain(model, optimizer, None, loader, loops.NUM_STEPS, loops.NUM_MICROBATCHES)
    for number in range(1, loops.NUM_STEPS + 1):
        optimizer.param_groups[0]["lr"] = gpu_scripts.rate_at(number)
        yield next(losses)


@pytest.mark.parametrize("layout", ["dp=3", "dp=2,fsdp=2"])
def test_script_that_moves_its_model_equals_the_cpu(layout: str, tmp_path: Path) -> None:
    run = run_on_gpu(tmp_path, gpu_scripts, "train", layout)
    assert run.losses() == pytest.approx(dict(enumerate(plain_losses(), start=1)), rel=1e-8)


def test_script_by_autocast_is_close_to_the_cpu(tmp_path: Path) -> None:
    run = run_on_gpu(tmp_path, gpu_scripts, "train_by_autocast", "dp=3")
    assert run.losses() == pytest.approx(dict(enumerate(plain_losses(), start=1)), rel=0.05)


def test_dropout_on_a_gpu_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    """Nor do a scheduler, momentum and the buffers of batch normalization."""
    losses = []
    for layout, num_deaths in (("dp=1", 0), ("dp=3", 2)):
        (folder := tmp_path / layout).mkdir()
        run = run_on_gpu(folder, script_habits, "one_cycle", layout, num_deaths)
        losses.append(run.losses())
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
