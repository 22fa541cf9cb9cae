"""The common part of the bare loops: model, data, batch and optimizer of our run, and the step log.

RECIPE is the `recipe.json` of our run; FOLDER gets `steps.jsonl`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from mlp import StepLog
from torch import Tensor, nn

from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.sample_order import batch_ids, sample_of
from pipelines.run.program import make_workload
from pipelines.settings import TrainSettings
from pipelines.training.workload.optimizer import learning_rate
from pipelines.training.workload.parallel_groups import ALONE, ParallelGroups
from pipelines.training.workload.state import initial_value, state_specs
from pipelines.training.workload.workload import ModuleInputs, Workload

CPU = torch.device("cpu")


StepOf = Callable[[int], float]
"""Trains one step, counted from 1, and returns its mean loss."""


class Job(NamedTuple):
    """Settings, workload and layout."""

    settings: TrainSettings
    workload: Workload
    layout: Layout


def run(make_step: Callable[[Job], StepOf]) -> None:
    """The `main` of a bare loop: one thread, Gloo, `script FOLDER RECIPE`; it trains forever."""
    torch.set_num_threads(1)
    recipe = json.loads(Path(sys.argv[2]).read_text())
    settings = TrainSettings.model_validate(recipe["settings"])
    dist.init_process_group("gloo")
    step_log = StepLog(Path(sys.argv[1]), dist.get_rank())
    workload = make_workload(settings, recipe["data_folder"])
    step_of = make_step(Job(settings, workload, Layout.parse(recipe["layout"])))
    for step in count(1):
        loss = step_of(step)
        if dist.get_rank() == 0:
            step_log.commit(step, dist.get_world_size(), loss=loss)


def make_module(job: Job, parallel: ParallelGroups = ALONE) -> nn.Module:
    """The model with our initial values."""
    module = job.workload.module(parallel)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for spec in state_specs(job.workload, job.settings):
            if spec.kind == "parameter":
                whole = Region((0,) * len(spec.shape), spec.shape)
                value = initial_value(job.workload, job.settings, spec, whole)
                parameters[spec.name].copy_(value)
    return module


def make_optimizer(parameters: Iterable[Tensor], job: Job) -> torch.optim.Optimizer:
    chosen, weights = job.settings.optimizer, list(parameters)
    matrices = [weight for weight in weights if weight.ndim > 1]
    vectors = [weight for weight in weights if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": chosen.weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    betas = (chosen.beta1, chosen.beta2)
    return torch.optim.AdamW(groups, chosen.lr, betas, chosen.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, job: Job, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(job.settings.optimizer, step)


def microbatch_inputs(
    job: Job, step: int, data_rank: int = 0, num_data_ranks: int = 1
) -> list[ModuleInputs]:
    """A data rank's microbatches of a step."""
    settings, workload = job.settings, job.workload
    ids, size = batch_ids(step, settings.batch), settings.microbatch
    firsts = range(data_rank * size, settings.batch, num_data_ranks * size)
    chosen = (
        [sample_of(settings.seed, i, workload.num_samples) for i in ids[first : first + size]]
        for first in firsts
    )
    return [workload.feed(workload.read(samples), CPU, ALONE, 0) for samples in chosen]


def num_tokens(job: Job, own: Iterable[ModuleInputs]) -> int:
    """The number of losses of a rank's microbatches; with full windows a constant, as many loops
    assume."""
    return sum(int(job.workload.num_tokens(fed.targets)) for fed in own)
