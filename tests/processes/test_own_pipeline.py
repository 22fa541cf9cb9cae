"""A module of one's own on the stages of a pipeline: killed and resized, as the plain loop."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import own_chain
import pytest
import torch
from harness import run_plainly

from actors.faults import Fault
from elastic.events import WorkerLeaving
from pipelines.weights import weights_of

RECIPE = f"{Path(own_chain.__file__)}:recipe"


@cache
def plain():
    """On one thread: two that wait for each other on a busy machine take ten times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return own_chain.plainly()
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_workers", "changes"),
    [
        ("pp=2", 2, {}),
        ("dp=2,pp=2", 4, {}),
    ],
)
def test_killed_and_resized(layout: str, num_workers: int, changes, tmp_path: Path) -> None:
    """Whoever is left takes all of the stages, if they are too few for two."""
    faults = (Fault("kill", "w1", 6, "compute"),)
    leaving = ((12, WorkerLeaving("w0", "shrinks")),)
    run = run_plainly(
        tmp_path,
        own_chain.OWN.model_copy(update=changes),
        num_workers,
        layout=layout,
        faults=faults,
        due=leaving,
        recipe=RECIPE,
    )
    losses, evaluated, state = plain()
    assert run.stopped.outcome == "completed", run.stopped
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    told = {line["step"]: [line["loss"], line["metrics"]] for line in run.told("Evaluated")}
    assert told.keys() == evaluated.keys()
    for step, (held_out_loss, accuracy) in evaluated.items():
        assert told[step] == [
            pytest.approx(held_out_loss, rel=1e-9),
            [["accuracy", pytest.approx(accuracy)]],
        ]
    ours = weights_of(run.folder)
    assert ours.keys() == state.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-11)
