"""Whole parameters and buffers on every worker: gathered from all shards, and written back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions

from actors.distributed.stall import wait_for
from actors.runtime.program import Groups, Interrupt
from elastic.geometry.shard_map import sharding_of
from elastic.geometry.tensor_specs import TensorSpec
from pipelines.loop.state.errors import LoopMisused
from pipelines.training.workload.initial_values import slices_of


def sum_over_workers(numbers: Sequence[float], groups: Groups) -> list[float]:
    """The sum of each of these numbers over all workers."""
    counted = torch.tensor(numbers, dtype=torch.float64, device=groups.device)
    wait_for(groups.world.allreduce([counted]))
    summed: list[float] = counted.tolist()
    return summed


def empty(spec: TensorSpec, device: torch.device) -> Tensor:
    """A whole tensor of a spec without values."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)


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
    whole = empty(spec, groups.device)
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


def share(
    specs: Sequence[TensorSpec], own: Mapping[str, Tensor], groups: Groups, interrupt: Interrupt
) -> dict[str, Tensor]:
    """The whole tensors of the first rank that has some of its own; empty if none has."""
    having = [0.0] * groups.layout.num_workers
    having[groups.world_rank] = float(len(own))
    counted = sum_over_workers(having, groups)
    interrupt()
    if not any(counted):
        return {}
    first = next(rank for rank, count in enumerate(counted) if count)
    is_first = first == groups.world_rank
    chosen = sum_over_workers([float(is_first and spec.name in own) for spec in specs], groups)
    interrupt()
    shared = {}
    for spec in (spec for spec, is_chosen in zip(specs, chosen, strict=True) if is_chosen):
        value = empty(spec, groups.device)
        if is_first:
            value.copy_(own[spec.name])
        broadcast(value, first, groups)
        interrupt()
        shared[spec.name] = value
    return shared


@torch.no_grad()
def write_regions(
    specs: Sequence[TensorSpec],
    values: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    groups: Groups,
) -> None:
    """Write this rank's regions of the whole `values` into its tensors of the same names.

    Raises `LoopMisused` for values with fewer digits than these.
    """
    for spec in specs:
        value, local = values.get(spec.name), tensors.get(spec.name)
        if value is None or local is None:
            continue
        if value.is_floating_point() and value.itemsize < local.itemsize:
            raise LoopMisused(
                f"the script has changed {spec.name} of its model between two steps, in "
                f"{value.dtype}, of which the run holds more digits: prepare the model in "
                f"{local.dtype}"
            )
        region = sharding_of(spec, groups.layout).region(groups.world_rank)
        local.copy_(value[slices_of(region)])
