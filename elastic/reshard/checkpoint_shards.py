"""Checkpoint shards: which worker writes which region, and which file a reader opens for it.

Each region is written once, and its holders share the work. Writers and readers compute the
same answer from specs and layout, so a checkpoint needs no list of its regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod

from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.shard_map import Axis, Sharding, sharding_of
from elastic.geometry.tensor_specs import TensorSpec

MAX_WRITERS = 8
"""Most writers of the regions that the same workers hold: it bounds the files a reader opens."""
BYTES_PER_WRITER = 256 << 20
"""Bytes for each writer: less is not worth another file."""

Replicas = tuple[tuple[range, ...], tuple[Axis, ...]]
"""The stages and the replicating axes: tensors that share both have the same groups of holders."""


class Writers:
    """Which world rank writes each region of a checkpoint.

    Of the allowed holders of a region a few write, evenly spaced in world-rank order, so that they
    lie on different nodes. The next region starts with the next holder, so that all nodes write.
    Tensors are dealt round robin to these few.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        layout: Layout,
        members: Sequence[str],
        allowed: Iterable[str],
    ) -> None:
        """`members` are in world-rank order; only the `allowed` ones may write."""
        self.shardings = [sharding_of(spec, layout) for spec in specs]
        allowed_members = set(allowed)
        self._may_write = [member in allowed_members for member in members]
        self._bytes_per_rank: dict[Replicas, int] = {}
        self._chosen: dict[tuple[Replicas, int], list[int]] = {}
        for spec, sharding in zip(specs, self.shardings, strict=True):
            key = _replicas(sharding)
            num_bytes = ceil(spec.num_bytes / prod(cut.axis.degree for cut in sharding.cuts))
            self._bytes_per_rank[key] = self._bytes_per_rank.get(key, 0) + num_bytes

    def writer(self, index: int, first_holder: int) -> int | None:
        """The world rank that writes a region of tensor `index`; None if no holder may write."""
        sharding = self.shardings[index]
        key = (_replicas(sharding), first_holder)
        if key not in self._chosen:
            self._chosen[key] = self._choose(sharding, first_holder)
        chosen = self._chosen[key]
        return chosen[index % len(chosen)] if chosen else None

    def _choose(self, sharding: Sharding, first_holder: int) -> list[int]:
        allowed = [rank for rank in sharding.holders(first_holder) if self._may_write[rank]]
        num_pieces = ceil(self._bytes_per_rank[_replicas(sharding)] / BYTES_PER_WRITER)
        num_writers = min(len(allowed), MAX_WRITERS, max(1, num_pieces))
        indices = (first_holder + i * len(allowed) // num_writers for i in range(num_writers))
        return [allowed[index % len(allowed)] for index in indices]


def tensors_to_write(
    specs: Sequence[TensorSpec], assignment: Assignment, writers: Iterable[str], worker: str
) -> tuple[int, ...]:
    """The indices of the tensors whose region `worker` writes, without any collective.

    The members together write each region exactly once.
    """
    world_rank = assignment.world_rank(worker)
    chosen = Writers(specs, assignment.layout, assignment.members, writers)
    indices: list[int] = []
    for index, sharding in enumerate(chosen.shardings):
        if not sharding.is_held_by(world_rank) or not sharding.region(world_rank).num_elements:
            continue
        if chosen.writer(index, sharding.first_holder(world_rank)) == world_rank:
            indices.append(index)
    return tuple(indices)


def writers_of(
    specs: Sequence[TensorSpec],
    layout: Layout,
    members: Sequence[str],
    writers: Iterable[str],
    wanted: Mapping[str, Region],
) -> set[str]:
    """The workers that wrote any of the wanted regions: the inverse of `tensors_to_write`.

    `members` are in world-rank order; `wanted` is by tensor name.
    """
    chosen, workers = Writers(specs, layout, members, writers), set()
    for index, spec in enumerate(specs):
        region = wanted.get(spec.name)
        if region is None:
            continue
        for first, _ in chosen.shardings[index].overlaps(region):
            writer = chosen.writer(index, first)
            if writer is not None:
                workers.add(members[writer])
    return workers


def _replicas(sharding: Sharding) -> Replicas:
    return sharding.stages, sharding.copies
