"""Checkpoint shards: which worker writes which region, and who wrote what a reader wants.

Each region is written once, the work spread over some of its holders. Both sides compute it from
specs and layout, so a checkpoint needs no list of its regions.
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
"""Of what the same workers hold: a reader of it opens as many files, however many hold it."""
BYTES_PER_WRITER = 256 << 20
"""One more writes for each such piece: less is not worth a further file."""

Replicas = tuple[range, tuple[Axis, ...]]
"""The stage and the axes that replicate: tensors that have them in common have the same holders,
each region those of its first one."""


class Writers:
    """Which world rank writes each region of a checkpoint.

    Of the holders of a region that may write, a few do, evenly spaced in world-rank order, so that
    they lie on different nodes; the next region begins with the next holder, so that all nodes
    write. Among these few tensor i falls to the i-th, round and round.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        layout: Layout,
        members: Sequence[str],
        allowed: Iterable[str],
    ) -> None:
        """`members` are in world-rank order; the `allowed` ones may write."""
        self.shardings = [sharding_of(spec, layout) for spec in specs]
        may_write = set(allowed)
        self._may_write = [member in may_write for member in members]
        self._bytes_per_rank: dict[Replicas, int] = {}
        self._chosen: dict[tuple[Replicas, int], list[int]] = {}
        for spec, sharding in zip(specs, self.shardings, strict=True):
            key = _replicas(sharding)
            num_bytes = ceil(spec.num_bytes / prod(cut.axis.degree for cut in sharding.cuts))
            self._bytes_per_rank[key] = self._bytes_per_rank.get(key, 0) + num_bytes

    def writer(self, index: int, first_holder: int) -> int | None:
        """Who writes a region of tensor `index`; None if none of its holders may."""
        sharding = self.shardings[index]
        key = (_replicas(sharding), first_holder)
        if key not in self._chosen:
            self._chosen[key] = self._choose(sharding, first_holder)
        chosen = self._chosen[key]
        return chosen[index % len(chosen)] if chosen else None

    def _choose(self, sharding: Sharding, first_holder: int) -> list[int]:
        able = [rank for rank in sharding.holders(first_holder) if self._may_write[rank]]
        num_pieces = ceil(self._bytes_per_rank[_replicas(sharding)] / BYTES_PER_WRITER)
        num_writers = min(len(able), MAX_WRITERS, max(1, num_pieces))
        places = (first_holder + i * len(able) // num_writers for i in range(num_writers))
        return [able[place % len(able)] for place in places]


def my_share(
    specs: Sequence[TensorSpec], assignment: Assignment, writers: Iterable[str], worker: str
) -> tuple[int, ...]:
    """The indices of the tensors whose region `worker` writes: no collective, and each region is
    written exactly once."""
    world_rank = assignment.world_rank(worker)
    chosen = Writers(specs, assignment.layout, assignment.members, writers)
    mine: list[int] = []
    for index, sharding in enumerate(chosen.shardings):
        if world_rank not in sharding.stage or not sharding.region(world_rank).num_elements:
            continue
        if chosen.writer(index, sharding.first_holder(world_rank)) == world_rank:
            mine.append(index)
    return tuple(mine)


def writers_of(
    specs: Sequence[TensorSpec],
    layout: Layout,
    members: Sequence[str],
    writers: Iterable[str],
    wanted: Mapping[str, Region],
) -> set[str]:
    """Who wrote any of the wanted regions, by tensor name: the inverse of `my_share`.

    `members` are in world-rank order.
    """
    chosen, found = Writers(specs, layout, members, writers), set()
    for index, spec in enumerate(specs):
        region = wanted.get(spec.name)
        if region is None:
            continue
        for first, _ in chosen.shardings[index].overlaps(region):
            writer = chosen.writer(index, first)
            if writer is not None:
                found.add(members[writer])
    return found


def _replicas(sharding: Sharding) -> Replicas:
    return sharding.stage, sharding.copies
