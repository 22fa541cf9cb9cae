"""Whole parameters and buffers on every worker, gathered from the shards of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions

from actors.distributed.stall import wait_for
from actors.runtime.program import Groups, Interrupt
from elastic.geometry.shard_map import sharding_of
from elastic.geometry.tensor_specs import TensorSpec
from pipelines.training.workload.initial_values import slices_of


def broadcast(tensor: Tensor, rank: int, groups: Groups) -> None:
    """Give all workers the tensor of one rank, in place."""
    options = BroadcastOptions()
    options.rootRank = rank
    wait_for(groups.world.broadcast([tensor], options))


@torch.no_grad()
def gather_whole(
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, Tensor],
    groups: Groups,
    interrupt: Interrupt,
    into: Mapping[str, Tensor],
) -> None:
    """Gather the whole tensors of these specs, one after another, into those of the same names.

    All ranks call it, also those that keep none.
    """
    for spec in specs:
        interrupt()
        whole = _gathered(spec, tensors.get(spec.name), groups)
        if (target := into.get(spec.name)) is not None:
            target.copy_(whole)


def _gathered(spec: TensorSpec, local: Tensor | None, groups: Groups) -> Tensor:
    sharding = sharding_of(spec, groups.layout)
    whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=groups.device)
    for rank in sharding.first_holders():
        region = sharding.region(rank)
        if not region.num_elements:
            continue
        part = torch.empty(region.shape, dtype=whole.dtype, device=whole.device)
        if rank == groups.world_rank:
            assert local is not None, f"{spec.name}: this rank holds a region, but no tensor"
            part.copy_(local)
        broadcast(part, rank, groups)
        whole[slices_of(region)] = part
    return whole
