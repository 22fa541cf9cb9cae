"""Custom pipelines with dropout: killed and resized runs equal the plain loop."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import custom_chain
import pytest
import torch
from harness import Outcome, run_in_processes
from test_snapshots import kill

from actors.runtime.fault_spec import Fault
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested, WorkerDraining
from pipelines.training.checkpoint.weights import load_weights

RECIPE = f"{Path(custom_chain.__file__)}:recipe"


@cache
def plain_results(microbatch: int, make_net: type[custom_chain.Net] = custom_chain.Net):
    """Train with one thread: two that wait for each other are ten times slower under load."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return custom_chain.train_in_one_process(microbatch, make_net)
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
    assert_equals(run, *plain_results(settings.microbatch))


@pytest.mark.slow
def test_tied_head_of_a_killed_pipeline_trains_as_one_process_under_other_layouts(
    tmp_path: Path,
) -> None:
    """The first and the last stage each have the weight, also where middle stages lack it."""
    layouts = {12: "pp=3", 40: "pp=2"}
    run = run_in_processes(
        tmp_path,
        custom_chain.CUSTOM_SETTINGS,
        3,
        layout="pp=2",
        due=tuple(
            (step, LayoutRequested(layout, TargetLayout.parse(layout)))
            for step, layout in layouts.items()
        ),
        faults=(Fault("kill", "w2", 20, "compute"),),
        recipe=f"{Path(custom_chain.__file__)}:tied_recipe",
        snapshot_every=1,
    )
    assert run.stopped.outcome == "completed", run.stopped
    trained = [line["layout"] for line in run.lines_of("Resume")]
    assert trained[:3] == ["pp=2", "pp=3", "dp=2"] and trained[-1] == "pp=2", run.story()
    assert trained[3:-1] in ([], ["pp=3"]), "with the worker that replaces w2, if it is in time"
    assert_equals(run, *plain_results(custom_chain.SETTINGS.microbatch, custom_chain.TiedNet))


def assert_equals(
    run: Outcome, losses: list[float], expected_evaluations: dict[int, Any], state: dict[str, Any]
) -> None:
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    evaluations = {
        line["step"]: [line["loss"], dict(line["metrics"])] for line in run.lines_of("Evaluated")
    }
    assert evaluations.keys() == expected_evaluations.keys()
    for step, (held_out_loss, accuracy) in expected_evaluations.items():
        assert evaluations[step][0] == pytest.approx(held_out_loss, rel=1e-9)
        assert evaluations[step][1] == {"accuracy": pytest.approx(accuracy)}
    actual = load_weights(run.folder)
    assert state.keys() - actual.keys() <= {"head.weight"}, "tied parameters are stored once"
    for name, value in actual.items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-11)
