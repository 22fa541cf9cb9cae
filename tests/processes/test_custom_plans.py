"""Plans in the words of torch's parallel styles: a run on tp=2, then on one worker, equals a plain
loop."""

from __future__ import annotations

from pathlib import Path

import custom_llama
import pytest
import torch
from harness import run_in_processes

from elastic.protocol.events import WorkerDraining


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "recomputation"), [("of_tutorial", "none"), ("of_titan", "full")])
def test_plan_of_torch_styles_trains_as_one_process_also_through_a_reshard(
    plan: str, recomputation: str, tmp_path: Path
) -> None:
    """With dropout of whole and of sharded activations, and of attention weights."""
    run = run_in_processes(
        tmp_path,
        custom_llama.CUSTOM_SETTINGS.model_copy(update={"activation_checkpointing": recomputation}),
        2,
        layout="tp=2",
        due=((8, WorkerDraining("w1", "shrinks")),),
        recipe=f"{custom_llama.__file__}:{plan}",
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert [line["layout"] for line in run.lines_of("Resume")] == ["tp=2", "dp=1"]
    torch.set_num_threads(1)
    assert list(run.losses().values()) == pytest.approx(
        custom_llama.train_in_one_process(), rel=1e-9
    )
