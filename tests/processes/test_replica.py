"""The replica equals a plain loop, on one process and on any mesh of dp and fsdp."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import plain_loop
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from actors.program import Groups
from elastic.assignment import Assignment
from elastic.layout import Layout
from elastic.regions import Region
from elastic.samples import batch_ids, sample_of
from elastic.votes import Vote
from pipelines.optimizer import learning_rate
from pipelines.program import TrainingProgram
from pipelines.recipes import tiny
from pipelines.replica import DataParallelReplica
from pipelines.settings import DataSettings, TrainSettings
from pipelines.warm_up import group_of_one

NUM_STEPS = 10
LAYOUTS = (Layout(), Layout(dp=2), Layout(fsdp=2), Layout(fsdp=3), Layout(dp=2, fsdp=2))
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "batch": 5,
        "eval_every": 1,
        "eval_samples": 3,
    }
)
CPU = torch.device("cpu")


def make_program(settings: TrainSettings = SETTINGS) -> TrainingProgram:
    return TrainingProgram(settings.model_dump(mode="json"), device="cpu")


def shard(program: TrainingProgram, layout: Layout, world_rank: int) -> dict[str, torch.Tensor]:
    """What a rank holds at step 0, by torch's chunk semantics along dim 0."""
    tensors = {}
    for spec in program.specs():
        whole = program.initial(spec, Region((0,) * len(spec.shape), spec.shape))
        if spec.fsdp_dim is not None:
            chunks = whole.chunk(layout.fsdp, spec.fsdp_dim)
            place = layout.coordinates(world_rank).fsdp
            whole = chunks[place] if place < len(chunks) else whole[:0]
        tensors[spec.name] = whole.clone()
    return tensors


def never() -> None:
    pass


def train_step(replica: DataParallelReplica, step: int) -> float:
    sums = replica.compute(step, never)
    dist.all_reduce(sums)
    loss_sum, num_tokens, sq_grad_norm = sums.tolist()
    replica.apply(step, Vote(step, loss_sum, int(num_tokens), sq_grad_norm, dist.get_world_size()))
    return loss_sum / num_tokens


def expected() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and final weights of the plain loop."""
    program = make_program()
    model, data, optimizer = SETTINGS.model, program.workload.train, SETTINGS.optimizer
    plain = plain_loop.Plain(
        model.num_layers,
        model.num_heads,
        model.rope_theta,
        model.norm_eps,
        tuple(learning_rate(optimizer, step) for step in range(1, NUM_STEPS + 1)),
        (optimizer.beta1, optimizer.beta2),
        optimizer.weight_decay,
        optimizer.max_grad_norm,
    )
    weights = shard(program, Layout(), 0)
    weights = {name: value for name, value in weights.items() if not name.startswith("optimizer.")}
    batches = []
    for step in range(1, NUM_STEPS + 1):
        ids = batch_ids(step, SETTINGS.batch)
        batch = data.read([sample_of(SETTINGS.seed, one, data.num_samples) for one in ids])
        batches.append((batch.tokens, batch.targets))
    return plain_loop.train(plain, weights, batches), weights


def run_rank(world_rank: int, folder: Path) -> None:
    """One of four processes: train under each layout that has such a rank."""
    torch.set_num_threads(1)
    file = dist.FileStore(str(folder / "store"), 4)
    for layout in LAYOUTS:
        if world_rank >= layout.num_workers:
            continue
        store = dist.PrefixStore(str(layout), file)
        dist.init_process_group(
            "gloo", store=store, rank=world_rank, world_size=layout.num_workers
        )
        result = train_under(layout, world_rank, folder)
        torch.save(result, folder / f"{layout}-{world_rank}.pt")
        dist.destroy_process_group()


def train_under(layout: Layout, world_rank: int, folder: Path) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (layout.dp, layout.fsdp), mesh_dim_names=("dp", "fsdp"))
    members = tuple(f"w{i}" for i in range(layout.num_workers))
    assignment = Assignment(7, layout, members)
    groups = Groups(assignment, world_rank, CPU, dist.group.WORLD, mesh)
    log = folder / f"{layout}.jsonl"
    program = make_program(SETTINGS.model_copy(update={"record_samples": log}))
    replica = program.build(groups)
    given = shard(program, layout, world_rank)
    replica.adopt(given)
    held_out = replica.evaluate(0, never)
    losses = [train_step(replica, step) for step in range(1, NUM_STEPS + 1)]
    replica.compute(NUM_STEPS + 1, never)
    vote = Vote(NUM_STEPS + 1, 1.0, 1, 1.0, layout.num_workers)
    with CommDebugMode() as counted:
        replica.apply(NUM_STEPS + 1, vote)
    num_collectives = counted.get_total_counts()
    ...
