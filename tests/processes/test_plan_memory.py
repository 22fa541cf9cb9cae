"""The memory model agrees with the live bytes of a real step, and its state bytes are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.planner.models.worker_memory import worker_memory
from elastic.protocol.votes import Vote
from pipelines.run.job import job_of
from pipelines.run.plan import TrainRequest, make_plan
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings, TransformerSettings
from pipelines.training.replica.memory_trial import LiveBytes
from pipelines.training.replica.warm_up import group_of_one

SETTINGS = tiny().model_copy(
    update={
        "model": TransformerSettings(dim=96, num_layers=4, num_heads=4, hidden_dim=256),
        "data": DataSettings(source="random", seq_len=64),
        "batch": 8,
        "microbatch": 2,
        "pass_samples": 2,
    }
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bfloat16"},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"batch": 2},
    ],
    ids=str,
)
def test_predicted_peak_is_the_measured_one(changes: dict[str, Any]) -> None:
    settings = SETTINGS.model_copy(update=changes)
    program = TrainingProgram(settings.model_dump(mode="json"), device="cpu")
    predicted = worker_memory(job_of(settings, program, (1,)), Layout())
    with group_of_one(program.device) as groups, LiveBytes() as live:
        replica = program.build(groups)
        specs = program.specs()
        replica.adopt({s.name: program.initial(s, Region.whole(s.shape)) for s in specs})
        live.peak = live.now
        loss_sum, num_tokens, sq_norm = replica.compute(1, lambda: None).tolist()
        sizes = replica.state_bytes()
        replica.apply(1, Vote(1, loss_sum, int(num_tokens), sq_norm, 1))
        del replica
    assert 0.95 * live.peak <= predicted.total <= 1.08 * live.peak
    assert predicted.parameters + predicted.copies == sizes.param_bytes
    assert predicted.optimizer == sizes.optimizer_bytes


def test_a_run_on_gpus_knows_the_activations_of_its_layout(tmp_path: Path) -> None:
    request = TrainRequest("tiny", storage=str(tmp_path), layout="tp=2")
    on_cpus = make_plan(request, num_gpus=0).run.opening.job
    on_gpus = make_plan(request, num_gpus=2).run.opening.job
    assert not on_cpus.memory.passes and on_cpus.margin == 1.2
    assert [each.tp for each in on_gpus.memory.passes] == [2] and on_gpus.margin == 1.08
