"""Custom pipelines: killed and resized runs equal the plain loop."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import custom_chain
import pytest
import torch
from harness import run_in_processes
from test_snapshots import kill

from elastic.protocol.events import WorkerDraining
from pipelines.training.checkpoint.weights import weights_of

RECIPE = f"{Path(custom_chain.__file__)}:recipe"


@cache
def plain(microbatch: int):
    """One thread: on a busy machine, two that wait for each other are ten times slower."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return custom_chain.train_in_one_process(microbatch)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_workers", "changes", "formed_groups"),
    [
        ("pp=2", 2, {}, ["pp=2", "dp=1"]),
        ("dp=2,pp=2", 4, {}, ["pp=2,dp=2", "pp=2"]),
        (
            "pp=2,vp=2",
            2,
            {"schedule": "zero_bubble", "microbatch": 5},
            ["pp=2,vp=2", "dp=1"],
        ),
    ],
)
def test_killed_and_resized(
    layout: str, num_workers: int, changes: dict[str, Any], formed_groups: list[str], tmp_path: Path
) -> None:
    """The last worker takes all stages; evaluations end with a smaller microbatch."""
    leaving = ((45, WorkerDraining("w0", "shrinks")),)
    settings = custom_chain.CUSTOM_SETTINGS.model_copy(update=changes)
    run = run_in_processes(
        tmp_path,
        settings,
        num_workers,
        layout=layout,
        fleet_faults=[kill("w1")],
        due=leaving,
        recipe=RECIPE,
        snapshot_every=1,
    )
    assert run.stopped.outcome == "completed", run.stopped
    resumed = run.lines_of("Resume")
    assert [line["layout"] for line in resumed][:2] == formed_groups
    assert resumed[1]["step"] > 0, "from snapshots"
    losses, evaluated, state = plain(settings.microbatch)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    told = {
        line["step"]: [line["loss"], dict(line["metrics"])] for line in run.lines_of("Evaluated")
    }
    assert told.keys() == evaluated.keys()
    for step, (held_out_loss, accuracy) in evaluated.items():
        assert told[step][0] == pytest.approx(held_out_loss, rel=1e-9)
        assert told[step][1] == {"accuracy": pytest.approx(accuracy)}
    ours = weights_of(run.folder)
    assert ours.keys() == state.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-11)
