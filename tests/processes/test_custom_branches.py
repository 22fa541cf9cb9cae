"""Modules that skip blocks for some samples, so that ranks skip different ones."""

from __future__ import annotations

from pathlib import Path

import custom_branches
import pytest
import torch
from harness import run_in_processes

RECIPE = f"{Path(custom_branches.__file__)}:recipe"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2,zero=1", "dp=4"])
def test_blocks_that_some_ranks_skip_get_the_same_update_on_all(
    layout: str, tmp_path: Path
) -> None:
    num_workers = 4 if layout == "dp=4" else 2
    run = run_in_processes(
        tmp_path,
        custom_branches.CUSTOM_SETTINGS,
        num_workers,
        layout=layout,
        recipe=RECIPE,
        audit_every=1,
    )
    assert run.stopped.outcome == "completed", run.stopped
    torch.set_num_threads(1)
    assert list(run.losses().values()) == pytest.approx(
        custom_branches.train_in_one_process(), rel=1e-9
    )
    assert not run.lines_of("WorkerLost")
