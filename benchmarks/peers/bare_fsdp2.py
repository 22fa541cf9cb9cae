"""A bare torchrun + FSDP2 loop with the model, data, batch and optimizer of our run.

    torchrun --standalone --nproc-per-node 4 bare_fsdp2.py FOLDER RECIPE

It clips by the global norm and reduces the loss, as usual, and does not handle failures.
"""

from __future__ import annotations

import bare
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from elastic.geometry.layout import Layout
from pipelines.training.workload.workload import Workload, forward_loss


def shard(module: torch.nn.Module, workload: Workload, mesh: DeviceMesh) -> FSDPModule:
    """Shard each block, then the rest; without sharding nothing is gathered again."""
    several = mesh.size(mesh.ndim - 1) > 1
    for block in workload.blocks(module):
        fully_shard(block, mesh=mesh, reshard_after_forward=several)
    return fully_shard(module, mesh=mesh)


def make_mesh(layout: Layout) -> DeviceMesh:
    """A mesh with one axis if there are no replicas, as FSDP2 makes by default."""
    if layout.dp == 1:
        return init_device_mesh("cpu", (layout.fsdp,))
    return init_device_mesh("cpu", (layout.dp, layout.fsdp), mesh_dim_names=("dp", "fsdp"))


def make_step(job: bare.Job) -> bare.StepOf:
    module = bare.make_module(job)
    model = shard(module, job.workload, make_mesh(job.layout))
    optimizer = bare.make_optimizer(model.parameters(), job)

    def step_of(step: int) -> float:
        own = bare.microbatch_inputs(job, step, dist.get_rank(), dist.get_world_size())
        tokens = bare.num_tokens(job, own)
        total = torch.zeros(())
        for number, fed in enumerate(own, start=1):
            model.set_requires_gradient_sync(number == len(own))
            loss = forward_loss(job.workload, module, fed) / tokens
            loss.backward()
            total += loss.detach()
        bare.set_learning_rate(optimizer, job, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.settings.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    return step_of


if __name__ == "__main__":
    bare.run(make_step)
