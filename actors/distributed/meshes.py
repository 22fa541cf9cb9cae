"""Device meshes and groups of a layout: which ranks communicate along which axis."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from actors.distributed.backends.backend import GroupBackend
from actors.distributed.backends.torch_groups_private import PeerMessage, exchange_all
from actors.distributed.backends.waiting import waiting
from actors.distributed.stall import wait_for
from actors.runtime.program import Groups
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout


def form_groups(
    backend: GroupBackend,
    assignment: Assignment,
    world_rank: int,
    device: torch.device,
    timeout: timedelta,
    has_experts: bool = False,
) -> Groups:
    """The groups of one rank, after `init_world`; all ranks of the world call it.

    Raises torch's errors if a peer is gone.
    """
    layout = assignment.layout
    world = dist.group.WORLD
    assert world is not None
    by_cp = _ranks_by_axis(layout).transpose(3, 4).reshape(-1, layout.cp)
    by_sequence = _ranks_by_axis(layout).reshape(-1, layout.cp * layout.tp)
    spreads_tokens = by_sequence.shape[1] > 1
    mesh = _mesh(backend, dense_ranks(layout), timeout)
    if layout.pp > 1 and device.type == "cuda":
        connect_neighbours(mesh.get_group("pp"), device)
    return Groups(
        assignment,
        world_rank,
        device,
        world,
        mesh,
        cp=_group_of_rank(backend, "cp", by_cp, world_rank, timeout),
        sequence=_group_of_rank(backend, "sequence", by_sequence, world_rank, timeout)
        if has_experts and spreads_tokens
        else None,
        experts=_mesh(backend, expert_ranks(layout), timeout)
        if has_experts and (spreads_tokens or layout.ep > 1)
        else None,
    )


def connect_neighbours(group: ProcessGroup, device: torch.device) -> None:
    """Exchange a number with the ranks before and after this one in a ring.

    NCCL connects two ranks when they first exchange, and waits in the launch for the other: a stage
    of a pipeline would wait there while the one before compiles.
    """
    rank, size = group.rank(), group.size()
    peers = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    numbers = [torch.zeros(1, device=device) for _ in peers]
    receives = [PeerMessage(torch.empty_like(n), p, 0) for n, p in zip(numbers, peers, strict=True)]
    sends = [PeerMessage(number, peer, 0) for number, peer in zip(numbers, peers, strict=True)]
    for work in exchange_all(group, device, receives, sends):
        wait_for(work)
    if device.type == "cuda":
        waiting(torch.cuda.current_stream(device).synchronize)


def dense_ranks(layout: Layout) -> tuple[Tensor, tuple[str, ...]]:
    """World ranks by the axes `pp, replica, fsdp, tp`; `pp` and `tp` only if larger than 1.

    Ranks along `replica` hold the same part of a dense tensor: those of `dp` and `cp`, and at ZeRO
    stage 0 those of `fsdp` as well.
    """
    num_shards = layout.fsdp if layout.zero else 1
    by_shard = _ranks_by_axis(layout).transpose(2, 3)
    ranks = by_shard.reshape(layout.pp, -1, num_shards, layout.tp)
    return _drop_trivial_axes(ranks, ("pp", "replica", "fsdp", "tp"), ("pp", "tp"))


def expert_ranks(layout: Layout) -> tuple[Tensor, tuple[str, ...]]:
    """World ranks by the axes `pp, replica, fsdp, ep` of expert tensors."""
    rest = layout.fsdp * layout.cp * layout.tp // layout.ep
    shape = (layout.pp, layout.dp, rest, layout.ep)
    if not layout.zero:
        shape = (layout.pp, layout.dp * rest, 1, layout.ep)
    return _drop_trivial_axes(
        torch.arange(layout.num_workers).reshape(shape), ("pp", "replica", "fsdp", "ep"), ("pp",)
    )


def _ranks_by_axis(layout: Layout) -> Tensor:
    return torch.arange(layout.num_workers).reshape(layout.degrees)


def _drop_trivial_axes(
    ranks: Tensor, axes: tuple[str, ...], optional: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...]]:
    """Drop optional axes of degree 1: a group of one rank costs as much forming as any other."""
    kept = [i for i, axis in enumerate(axes) if ranks.shape[i] > 1 or axis not in optional]
    return ranks.reshape([ranks.shape[i] for i in kept]), tuple(axes[i] for i in kept)


def _group_of_rank(
    backend: GroupBackend, axis: str, rows: Tensor, world_rank: int, timeout: timedelta
) -> ProcessGroup | None:
    """The group of the row that contains this rank; None if the row has only this rank."""
    if rows.shape[1] == 1:
        return None
    ranks = next(row for row in rows.tolist() if world_rank in row)
    group = dist.new_group(
        ranks,
        timeout=timeout,
        backend=backend.name,
        pg_options=backend.options(timeout),
        use_local_synchronization=True,
        group_desc=axis,
    )
    assert isinstance(group, ProcessGroup)  # in torch 2.15 it may be a number, for ranks outside
    return group


def _mesh(
    backend: GroupBackend, arranged: tuple[Tensor, tuple[str, ...]], timeout: timedelta
) -> DeviceMesh:
    ranks, axes = arranged
    return DeviceMesh(
        backend.device_type,
        ranks,
        mesh_dim_names=axes,
        backend_override=tuple((backend.name, backend.options(timeout)) for _ in axes),
    )
