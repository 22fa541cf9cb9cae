"""Custom models: killed and resized runs equal the plain loop."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import custom_net
import pytest
import torch
from harness import Outcome, run_in_processes

from actors.runtime.fault_spec import Fault
from elastic.geometry.sample_order import microbatch_seed
from elastic.protocol.events import WorkerDraining
from pipelines.settings import ReadingSettings
from pipelines.training.checkpoint.weights import load_weights

pytestmark = pytest.mark.slow

RECIPE = f"{Path(custom_net.__file__)}:recipe"


@cache
def plain_results():
    """Train with one thread: two that wait for each other are ten times slower under load."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return custom_net.train_in_one_process(microbatch_seed)
    finally:
        torch.set_num_threads(num_threads)


def assert_equals_plain_loop(run: Outcome) -> None:
    assert run.stopped.outcome == "completed", run.stopped
    losses, expected_evaluations, state = plain_results()
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    evaluations = {
        line["step"]: [line["loss"], line["metrics"]] for line in run.lines_of("Evaluated")
    }
    assert evaluations.keys() == expected_evaluations.keys()
    for step, (held_out_loss, accuracy) in expected_evaluations.items():
        assert evaluations[step] == [
            pytest.approx(held_out_loss, rel=1e-9),
            [["accuracy", accuracy]],
        ]
    actual = load_weights(run.folder)
    assert actual.keys() == state.keys()
    for name, value in actual.items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("layout", "num_workers", "num_readers"),
    [
        ("dp=3", 3, 2),
        pytest.param("dp=3", 3, 0),
        pytest.param("fsdp=3", 3, 0),
        pytest.param("dp=2,tp=2", 4, 1),
    ],
)
def test_custom_model_killed_twice_and_resized_equals_the_plain_loop(
    layout: str, num_workers: int, num_readers: int, tmp_path: Path
) -> None:
    """There are five microbatches on three or two data ranks, so some ranks always pad."""
    faults = (Fault("kill", "w2", 6, "compute"), Fault("kill", "w1", 12, "apply"))
    drain = ((18, WorkerDraining("w0", "shrinks")),)
    run = run_in_processes(
        tmp_path,
        custom_net.CUSTOM_SETTINGS.model_copy(
            update={"reading": ReadingSettings(num_readers=num_readers)}
        ),
        num_workers,
        layout=layout,
        faults=faults,
        due=drain,
        recipe=RECIPE,
    )
    assert_equals_plain_loop(run)
    assert len({line["world_size"] for line in run.metrics}) > 1
