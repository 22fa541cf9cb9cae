"""A bare torchrun + tensor parallelism loop: torch's styles applied to the model by hand.

    torchrun --standalone --nproc-per-node 2 bare_tp2.py FOLDER RECIPE

The norms are sharded over the sequence and the loss is vocabulary-parallel, as in torch's tutorial.
"""

from __future__ import annotations

import bare
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from pipelines.training.workload.parallel_groups import ParallelGroups


def cut(module: nn.Module, mesh: DeviceMesh) -> None:
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    inner = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(**gather),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(**gather),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(module, mesh, outer)
    for block in module.layers.values():
        parallelize_module(block, mesh, inner)


def make_step(job: bare.Job) -> bare.StepOf:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallel = ParallelGroups(
        job.workload.seq_len, tp=mesh, tp_rank=mesh.get_local_rank(), num_tp=2
    )
    model = bare.make_module(job, parallel)
    cut(model, mesh)
    optimizer = bare.make_optimizer(model.parameters(), job)

    def step_of(step: int) -> float:
        own = bare.microbatch_inputs(job, step)
        tokens = bare.num_tokens(job, own)
        total = torch.zeros(())
        with loss_parallel():
            for fed in own:
                logits = model(fed.inputs, **fed.keywords).flatten(0, 1)
                targets = fed.targets.flatten()
                loss = functional.cross_entropy(logits, targets, reduction="sum") / tokens
                loss.backward()
                total += loss.detach().to_local()
        bare.set_learning_rate(optimizer, job, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.settings.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step_of


if __name__ == "__main__":
    bare.run(make_step)
