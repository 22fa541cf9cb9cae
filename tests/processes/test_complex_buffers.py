"""Models with complex buffers, such as the rotations of Llama, train as in a plain loop."""

from __future__ import annotations

from pathlib import Path

import custom_llama
import pytest
import torch
from harness import run_in_processes

from elastic.protocol.events import WorkerDraining


@pytest.mark.parametrize(
    ("function", "layout"),
    [
        pytest.param("of_tutorial", "fsdp=2", marks=pytest.mark.soak),
        ("train", "dp=2"),
        pytest.param("of_tutorial", "dp=2", marks=pytest.mark.soak),
        pytest.param("train", "fsdp=2", marks=pytest.mark.soak),
    ],
)
def test_complex_rotations_turn_in_a_run_as_in_a_plain_loop(
    function: str, layout: str, tmp_path: Path
) -> None:
    run = run_in_processes(
        tmp_path,
        custom_llama.CUSTOM_SETTINGS,
        2,
        layout=layout,
        due=((8, WorkerDraining("w1", "shrinks")),),
        recipe=f"{custom_llama.__file__}:{function}",
    )
    assert run.stopped.outcome == "completed", run.stopped
    torch.set_num_threads(1)
    expected = custom_llama.train_in_one_process()
    assert list(run.losses().values()) == pytest.approx(expected, rel=1e-9)
