"""The controller's description of a training job: sizes, limits and a digest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from actors.runtime.code_digest import digest_of_program
from elastic.geometry.tensor_specs import TensorSpec
from elastic.geometry.training_job import STATE_MARGIN, Job, MemoryFacts
from pipelines.run.program import TrainingProgram
from pipelines.settings import TrainSettings
from pipelines.settings.bounds import SEVERAL_STAGES
from pipelines.training.replica.model_bytes import memory_facts
from pipelines.training.workload.parallel_groups import ALONE

KNOWN_MARGIN = 1.08
"""The margin for the allocator: its blocks are larger than the tensors and not always adjacent."""


def job_of(
    settings: TrainSettings,
    program: TrainingProgram,
    tp_degrees: Iterable[int] = (),
    on_gpu: bool = False,
) -> Job:
    """The job of this program under these settings, with activations by trials of these degrees
    of `tp`; without any, they are not known. `on_gpu`: as GPUs keep them."""
    specs, shape = program.specs(), program.workload.shape()
    num_eval_samples = settings.num_evaluated(program.workload.num_held_out)
    experts = [spec for spec in specs if spec.ep_dim is not None]
    limits = program.workload.limits()
    has_pp = all(axis != "pp" for axis, _ in limits.refused)
    one_stage = None
    if settings.schedule not in SEVERAL_STAGES:
        one_stage = (
            f"schedule={settings.schedule} has one stage per rank; use "
            f"--set schedule={SEVERAL_STAGES[0]} or drop vp"
        )
    memory = MemoryFacts()
    if tp_degrees:
        memory = memory_facts(program.workload, settings, specs, tp_degrees, has_pp, on_gpu)
    return Job(
        num_microbatches=settings.num_microbatches,
        microbatch=settings.microbatch,
        state_bytes=_num_bytes(specs),
        param_bytes=_num_bytes(spec for spec in specs if spec.kind == "parameter"),
        expert_state_bytes=_num_bytes(experts),
        expert_param_bytes=_num_bytes(spec for spec in experts if spec.kind == "parameter"),
        steps=settings.steps,
        checkpoint_every=settings.checkpoint.every_steps,
        limits=replace(limits, one_stage=one_stage),
        layer_costs=tuple(layer.cost for layer in shape.layers),
        activation_bytes=program.workload.flowing(1, settings.microbatch, ALONE).nbytes
        if has_pp
        else 0,
        digest=digest_of_program(specs),
        seed=settings.seed,
        num_samples=program.workload.num_samples,
        eval_every=settings.eval_every,
        runs_script=program.loop is not None,
        updates_per_batch=settings.updates_per_batch,
        num_eval_samples=num_eval_samples if settings.eval_every else 0,
        memory=memory,
        margin=KNOWN_MARGIN if memory.passes else STATE_MARGIN,
    )


def _num_bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs)
