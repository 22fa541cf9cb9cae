"""Custom pipelines with dropout: killed and resized runs equal the plain loop."""

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
from pipelines.training.checkpoint.weights import load_weights

RECIPE = f"{Path(custom_chain.__file__)}:recipe"


@cache
def plain_results(microbatch: int):
    """Train with one thread: two that wait for each other are ten times slower under load."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return custom_chain.train_in_one_process(microbatch)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_workers", "changes", "trained_layouts"),
    [
        ("pp=2", 2, {}, ["pp=2", "dp=1"]),
        ("dp=2,pp=2", 4, {}, ["pp=2,dp=2", "pp=2"]),
        ("tp=2", 2, {}, ["tp=2", "dp=1"]),
        (
            "pp=2,vp=2",
            2,
            {"schedule": "zero_bubble", "microbatch": 5},
            ["pp=2,vp=2", "dp=1"],
        ),
    ],
)
def test_custom_pipeline_killed_and_resized_equals_the_plain_loop(
    layout: str,
    num_workers: int,
    changes: dict[str, Any],
    trained_layouts: list[str],
    tmp_path: Path,
) -> None:
    """The last worker takes all stages; evaluations end with a smaller microbatch."""
    drain = ((45, WorkerDraining("w0", "shrinks")),)
    settings = custom_chain.CUSTOM_SETTINGS.model_copy(update=changes)
    run = run_in_processes(
        tmp_path,
        settings,
        num_workers,
        layout=layout,
        fleet_faults=[kill("w1")],
        due=drain,
        recipe=RECIPE,
        snapshot_every=1,
    )
    assert run.stopped.outcome == "completed", run.stopped
    resumes = run.lines_of("Resume")
    assert [line["layout"] for line in resumes][:2] == trained_layouts
    assert resumes[1]["step"] > 0, "from snapshots"
    losses, expected_evaluations, state = plain_results(settings.microbatch)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    evaluations = {
        line["step"]: [line["loss"], dict(line["metrics"])] for line in run.lines_of("Evaluated")
    }
    assert evaluations.keys() == expected_evaluations.keys()
    for step, (held_out_loss, accuracy) in expected_evaluations.items():
        assert evaluations[step][0] == pytest.approx(held_out_loss, rel=1e-9)
        assert evaluations[step][1] == {"accuracy": pytest.approx(accuracy)}
    actual = load_weights(run.folder)
    assert actual.keys() == state.keys()
    for name, value in actual.items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-11)
