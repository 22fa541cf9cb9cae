"""Reference geometry, element by element; it shares only the deal of layers with the product.

Layouts, coordinates and specs are plain data. Everything else is computed on numpy arrays: which
elements each rank holds, and whether transfers give every worker each of its elements exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import ceil

import numpy as np
from numpy.typing import NDArray

from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.pipeline_stages import deal_layers
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.reshard_plan import ReshardPlan
from elastic.reshard.transfers import Transfers

Mask = NDArray[np.bool_]


def held_by_rank(spec: TensorSpec, layout: Layout) -> list[Mask]:
    """The elements of a tensor that each world rank holds."""
    axes = (layout.pp, layout.dp, layout.fsdp, layout.cp, layout.tp)
    return [_held(spec, layout, place) for place in product(*map(range, axes))]


def held_by_worker(spec: TensorSpec, assignment: Assignment | None) -> dict[str, Mask]:
    if assignment is None:
        return {}
    masks = held_by_rank(spec, assignment.layout)
    return dict(zip(assignment.members, masks, strict=True))


def is_covered(specs: Sequence[TensorSpec], layout: Layout, world_ranks: Sequence[int]) -> bool:
    """Whether these ranks together hold every element of every tensor."""
    for spec in specs:
        masks = held_by_rank(spec, layout)
        union = np.zeros(spec.shape, dtype=np.bool_)
        for rank in world_ranks:
            union |= masks[rank]
        if not union.all():
            return False
    return True


def lower_bound_bytes(specs: Sequence[TensorSpec], reshard: ReshardPlan) -> int:
    """The bytes of all new regions, minus those that their workers already have."""
    total = 0
    for spec in specs:
        old, new = held_by_worker(spec, reshard.old), held_by_worker(spec, reshard.new)
        for worker, new_elements in new.items():
            available = _available(reshard, worker, old, new_elements)
            total += int((new_elements & ~available).sum()) * spec.itemsize_bytes
    return total


def check_transfers(
    specs: Sequence[TensorSpec], reshard: ReshardPlan, transfers: Mapping[str, Transfers]
) -> int:
    """Execute transfers element by element, and return the bytes sent (invariant 3)."""
    _check_order(reshard, transfers)
    for index, spec in enumerate(specs):
        old, new = held_by_worker(spec, reshard.old), held_by_worker(spec, reshard.new)
        for worker, transfer in transfers.items():
            new_elements = new.get(worker, np.zeros(spec.shape, dtype=np.bool_))
            available = _available(reshard, worker, old, new_elements)
            num_written = np.zeros(spec.shape, dtype=np.int64)
            if index in transfer.kept:
                assert worker in reshard.holders
                assert np.array_equal(new_elements, old[worker])
                num_written += old[worker]
            for copy in transfer.copies:
                if copy.tensor == index:
                    assert available[_box(copy.region)].all()
                    num_written[_box(copy.region)] += 1
            for piece in transfer.receives:
                if piece.tensor == index:
                    num_written[_box(piece.region)] += 1
            for piece in transfer.sends:
                assert piece.tensor != index or available[_box(piece.region)].all()
            assert np.array_equal(num_written, new_elements.astype(np.int64))
    return sum(
        int(np.prod(piece.region.shape)) * specs[piece.tensor].itemsize_bytes
        for transfer in transfers.values()
        for piece in transfer.sends
    )


def _check_order(reshard: ReshardPlan, transfers: Mapping[str, Transfers]) -> None:
    """Check that B receives from A exactly what A sends to B, in the same order."""
    group = reshard.participants
    members = reshard.new.members
    sources = {*reshard.holders, *(part.carrier for part in reshard.carried)}
    assert group == (*members, *sorted(sources - set(members)))
    for (a, sender), (b, receiver) in product(enumerate(group), repeat=2):
        sent = [(p.tensor, p.region) for p in transfers[sender].sends if p.peer == b]
        received = [(p.tensor, p.region) for p in transfers[receiver].receives if p.peer == a]
        assert sent == received
        assert not sent or (sender in sources and sender != receiver)


def _available(reshard: ReshardPlan, worker: str, old: Mapping[str, Mask], like: Mask) -> Mask:
    """The elements of a worker: its own shard if it is a holder, and the shards that it carries."""
    available = np.zeros_like(like)
    if worker in reshard.holders:
        available |= old[worker]
    for part in reshard.carried:
        if part.carrier == worker:
            available |= old[part.member]
    return available


def _box(region: Region) -> tuple[slice, ...]:
    bounds = zip(region.offsets, region.shape, strict=True)
    return tuple(slice(begin, begin + length) for begin, length in bounds)


def _held(spec: TensorSpec, layout: Layout, place: tuple[int, ...]) -> Mask:
    pp, _, fsdp, cp, tp = place
    mask = np.zeros(spec.shape, dtype=np.bool_)
    own_layers = _layers(pp, layout, spec.layer_costs)
    held_layers = {spec.layer, len(spec.layer_costs) - 1} if spec.ties_ends else {spec.layer}
    if spec.layer is not None and not held_layers & set(own_layers):
        return mask
    indices_by_dim = [list(range(size)) for size in spec.shape]
    sharded = {"parameter": layout.zero > 0, "optimizer": layout.zero > 0, "buffer": False}
    fsdp_dim = spec.fsdp_dim if sharded[spec.kind] else None
    if spec.ep_dim is not None:
        block = list(product(range(layout.fsdp), range(layout.cp), range(layout.tp)))
        place_in_block = block.index((fsdp, cp, tp))
        num_groups = len(block) // layout.ep
        indices_by_dim[spec.ep_dim] = _chunk(
            indices_by_dim[spec.ep_dim], layout.ep, place_in_block % layout.ep
        )
        if fsdp_dim is not None:
            group = place_in_block // layout.ep
            own = _part(spec, indices_by_dim[fsdp_dim], num_groups, group, layout)
            indices_by_dim[fsdp_dim] = own
    else:
        if spec.tp_dim is not None:
            indices_by_dim[spec.tp_dim] = _chunk(indices_by_dim[spec.tp_dim], layout.tp, tp)
        if fsdp_dim is not None:
            own = _part(spec, indices_by_dim[fsdp_dim], layout.fsdp, fsdp, layout)
            indices_by_dim[fsdp_dim] = own
    if indices_by_dim:
        mask[np.ix_(*(np.array(indices, dtype=np.int64) for indices in indices_by_dim))] = True
    else:
        mask[()] = True
    return mask


def _layers(rank: int, layout: Layout, costs: tuple[int, ...]) -> list[int]:
    """The layers of one pipeline rank; the deal into stages has its own tests."""
    if layout.pp == 1 or not costs:
        return list(range(len(costs)))
    stages = deal_layers(costs, layout.pp * layout.vp)
    return [layer for stage in stages[rank :: layout.pp] for layer in stage]


def _part(
    spec: TensorSpec, indices: list[int], num_shards: int, index: int, layout: Layout
) -> list[int]:
    if spec.ownership is None:
        return _chunk(indices, num_shards, index)
    stage = spec.ownership.length / (layout.pp * layout.vp)
    share = stage / num_shards
    middle = spec.ownership.middle % stage
    return indices if index * share <= middle < (index + 1) * share else []


def _chunk(indices: list[int], num_chunks: int, index: int) -> list[int]:
    size = ceil(len(indices) / num_chunks)
    return indices[index * size : (index + 1) * size]
