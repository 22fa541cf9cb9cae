"""Checkpoint shards: which worker writes which region, and who wrote what a reader wants.

Each region is written once, the work spread over its holders. Both sides compute it from specs and
assignment, so a checkpoint needs no list of its regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elastic.assignment import Assignment
from elastic.layout import Layout
from elastic.regions import Region
from elastic.shards import Sharding, sharding_of
from elastic.specs import TensorSpec


def my_share(
    specs: Sequence[TensorSpec], assignment: Assignment, writers: Iterable[str], worker: str
) -> tuple[int, ...]:
    """The indices of the tensors whose region `worker` writes.

    Of the holders of a region that are among the `writers`, tensor i falls to the i-th, round and
    round: no collective, and each region is written exactly once.
    """
    world_rank = assignment.world_rank(worker)
    allowed = set(writers)
    mine: list[int] = []
    able_by_sharding: dict[Sharding, list[int]] = {}
    for index, spec in enumerate(specs):
        sharding = sharding_of(spec, assignment.layout)
        if world_rank not in sharding.stage or not sharding.region(world_rank).num_elements:
            continue
        if sharding not in able_by_sharding:
            first = sharding.first_holder(world_rank)
            able_by_sharding[sharding] = _able(sharding, first, assignment.members, allowed)
        able = able_by_sharding[sharding]
        if able[index % len(able)] == world_rank:
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
    allowed, found = set(writers), set()
    able: dict[tuple[Sharding, int], list[int]] = {}
    for index, spec in enumerate(specs):
        region = wanted.get(spec.name)
        if region is None:
            continue
        sharding = sharding_of(spec, layout)
        for first, _ in sharding.overlaps(region):
            key = (sharding, first)
            if key not in able:
                able[key] = _able(sharding, first, members, allowed)
            if able[key]:
                found.add(members[able[key][index % len(able[key])]])
    return found


def _able(
    sharding: Sharding, first_holder: int, members: Sequence[str], allowed: set[str]
) -> list[int]:
    """The world ranks that hold a region and may write it."""
    return [rank for rank in sharding.holders(first_holder) if members[rank] in allowed]
