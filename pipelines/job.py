"""What the controller is told of the training that a run is for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from actors.sources import digest_of_program
from elastic.planning import Job
from elastic.specs import TensorSpec
from pipelines.program import TrainingProgram
from pipelines.settings import SEVERAL_STAGES, TrainSettings
from pipelines.training.spread import ALONE


def job_of(settings: TrainSettings, program: TrainingProgram) -> Job:
    """By it layouts are planned and compared."""
    specs, shape = program.specs(), program.workload.shape()
    experts = [spec for spec in specs if spec.ep_dim is not None]
    one_stage = None
    if settings.schedule not in SEVERAL_STAGES:
        one_stage = (
            f"schedule={settings.schedule} knows one stage a rank; "
            f"--set schedule={SEVERAL_STAGES[0]} or drop vp"
        )
    return Job(
        num_microbatches=settings.num_microbatches,
        microbatch=settings.microbatch,
        state_bytes=_num_bytes(specs),
        param_bytes=_num_bytes(spec for spec in specs if spec.kind == "parameter"),
        expert_state_bytes=_num_bytes(experts),
        expert_param_bytes=_num_bytes(spec for spec in experts if spec.kind == "parameter"),
        steps=settings.steps,
        checkpoint_every=settings.checkpoint_steps,
        limits=replace(shape.limits, one_stage=one_stage),
        layer_costs=tuple(layer.cost for layer in shape.layers),
        activation_bytes=program.workload.flowing(1, settings.microbatch, ALONE).nbytes,
        digest=digest_of_program(specs),
    )


def _num_bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs)
