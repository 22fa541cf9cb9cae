"""A bare torchrun + FSDP2 loop: the same model, data, batch and optimizer as a run of ours.

    torchrun --standalone --nproc-per-node 4 bare_fsdp2.py FOLDER RECIPE

It clips by the global norm and reduces the loss, as any loop does, and knows nothing of failures.
RECIPE is the `recipe.json` of the run that it is compared with; FOLDER gets `steps.jsonl`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mlp import Told
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from elastic.layout import Layout
from elastic.samples import batch_ids, sample_of
from pipelines.program import make_workload
from pipelines.settings import TrainSettings
from pipelines.training.optimizer import learning_rate
from pipelines.training.spread import ALONE
from pipelines.training.workload import Workload, forward_loss


def shard(module: torch.nn.Module, workload: Workload, mesh: DeviceMesh) -> FSDPModule:
    """Each block, then the rest; where nothing is sharded, nothing is gathered anew."""
    several = mesh.size(mesh.ndim - 1) > 1
    for block in workload.blocks(module):
        fully_shard(block, mesh=mesh, reshard_after_forward=several)
    return fully_shard(module, mesh=mesh)


def make_mesh(layout: Layout) -> DeviceMesh:
    """One axis where there are no replicas, as FSDP2 has it by itself."""
    if layout.dp == 1:
        return init_device_mesh("cpu", (layout.fsdp,))
    return init_device_mesh("cpu", (layout.dp, layout.fsdp), mesh_dim_names=("dp", "fsdp"))


def batches(workload: Workload, settings: TrainSettings, step: int) -> Iterator[Any]:
    """This rank's microbatches of a step."""
    ids = batch_ids(step, settings.batch)
    size, world_size = settings.microbatch, dist.get_world_size()
    for first in range(dist.get_rank() * size, settings.batch, world_size * size):
        own = ids[first : first + size]
        yield workload.read([sample_of(settings.seed, i, workload.num_samples) for i in own])


def train(folder: Path, recipe: dict[str, Any], settings: TrainSettings) -> None:
    workload = make_workload(settings, recipe["data_folder"])
    torch.manual_seed(settings.seed)
    module = workload.module()
    model = shard(module, workload, make_mesh(Layout.parse(recipe["layout"])))
    chosen = settings.optimizer
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": chosen.weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    betas = (chosen.beta1, chosen.beta2)
    optimizer = torch.optim.AdamW(groups, chosen.lr, betas, chosen.eps, fused=True)
    told, device = Told(folder, dist.get_rank()), torch.device("cpu")
    for step in count(1):
        shares = list(batches(workload, settings, step))
        total = torch.zeros(())
        for number, batch in enumerate(shares, start=1):
            model.set_requires_gradient_sync(number == len(shares))
            fed = workload.feed(batch, device, ALONE, seed=0)
            num_tokens = workload.num_tokens(fed.targets) * len(shares)
            loss = forward_loss(workload, module, fed) / num_tokens
            loss.backward()
            total += loss.detach()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(chosen, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        mean_loss = total.item() / dist.get_world_size()
        if dist.get_rank() == 0:
            told.commit(step, dist.get_world_size(), loss=mean_loss)


def main() -> None:
    torch.set_num_threads(1)
    recipe = json.loads(Path(sys.argv[2]).read_text())
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), recipe, TrainSettings.model_validate(recipe["settings"]))


if __name__ == "__main__":
    main()
