"""Who writes what of a checkpoint: each region once, the work spread over its holders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic.assignment import Assignment
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
            holders = sharding.holders(sharding.first_holder(world_rank))
            able = [rank for rank in holders if assignment.members[rank] in allowed]
            able_by_sharding[sharding] = able
        able = able_by_sharding[sharding]
        if able[index % len(able)] == world_rank:
            mine.append(index)
    return tuple(mine)
