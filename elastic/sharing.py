"""What one worker keeps, sends and receives of all tensors that lie alike.

The old regions tile each tensor, so what a receiver wants falls apart into one piece for each
old region that overlaps it (found by arithmetic, see `shards`). The piece that lies in the
receiver's own old region is kept or copied in place; every other piece comes from one living
holder of that old region:

    holders[(region_index + copy_index) % len(holders)]

`holders` are the living ranks of the old assignment that hold the region, ascending;
`region_index` is the region's first holder in the old layout (dead or alive); `copy_index` is
the receiver's place among the new holders of its own region. (The receiver's plain world rank
would do, but the ranks that share a region lie `fsdp x cp x tp` apart: their remainders
coincide, and a few sources would serve everybody.) A sender inverts the formula: its
receivers are every `len(holders)`-th new holder. So no worker looks at all the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.errors import InvalidRelayout
from elastic.regions import Region
from elastic.relayout import Relayout
from elastic.shards import Axis, Sharding, sharding_of
from elastic.specs import TensorSpec


class Me(NamedTuple):
    """The deriving worker's world ranks: as a living holder, and as a new member."""

    old_rank: int | None
    new_rank: int | None


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who is who in a re-layout."""

    old_rank: dict[str, int]
    """World rank under `old` of each living holder."""
    new_rank: dict[str, int]
    old_rank_of_new: list[int | None]
    """For each new world rank, its old one if it is a living holder."""
    transfer_rank: dict[int, int]
    """By old world rank, living holders only."""
    living: dict[tuple[tuple[Axis, ...], int], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, relayout: Relayout) -> Fleet:
        holders = set(relayout.holders)
        old = relayout.old.members if relayout.old else ()
        old_rank = {worker: rank for rank, worker in enumerate(old) if worker in holders}
        transfer_rank = {worker: i for i, worker in enumerate(relayout.participants)}
        return cls(
            old_rank,
            {worker: rank for rank, worker in enumerate(relayout.new.members)},
            [old_rank.get(worker) for worker in relayout.new.members],
            {rank: transfer_rank[worker] for worker, rank in old_rank.items()},
        )

    def living_holders(self, sharding: Sharding, first_holder: int) -> list[int]:
        """Old world ranks that live and hold a region, ascending."""
        key = (sharding.copies, first_holder)
        if key not in self.living:
            ranks = sharding.holders(first_holder)
            self.living[key] = [rank for rank in ranks if rank in self.transfer_rank]
        return self.living[key]


class Share(NamedTuple):
    """What one worker does for every tensor of a class."""

    old_region: Region | None
    new_region: Region | None
    kept: bool
    copies: list[Region]
    sends: list[tuple[Region, int]]
    receives: list[tuple[Region, int]]
    num_moved: int
    num_needed: int


def share_of(spec: TensorSpec, relayout: Relayout, fleet: Fleet, me: Me) -> Share:
    """This worker's share in moving any tensor that lies like `spec`.

    Raises `InvalidRelayout` where no living holder has what this worker needs.
    """
    new = sharding_of(spec, relayout.new.layout)
    new_region = _region(new, me.new_rank)
    if relayout.old is None or not relayout.holders:
        num_needed = new_region.num_elements if new_region else 0
        return Share(None, new_region, False, [], [], [], 0, num_needed)
    old = sharding_of(spec, relayout.old.layout)
    old_region = _region(old, me.old_rank)
    kept = new_region is not None and new_region == old_region
    common = new_region.intersection(old_region) if new_region and old_region else None
    receives = [] if kept else list(_receives(spec, old, new, fleet, me))
    return Share(
        old_region,
        new_region,
        kept,
        [common] if common and not kept else [],
        list(_sends(old, new, fleet, me)),
        receives,
        sum(region.num_elements for region, _ in receives),
        _num_elements(new_region) - _num_elements(common),
    )


def _region(sharding: Sharding, world_rank: int | None) -> Region | None:
    if world_rank is None or world_rank not in sharding.stage:
        return None
    return sharding.region(world_rank)


def _num_elements(region: Region | None) -> int:
    return region.num_elements if region else 0


def _receives(
    spec: TensorSpec, old: Sharding, new: Sharding, fleet: Fleet, me: Me
) -> Iterator[tuple[Region, int]]:
    """The pieces of this worker's new region that it lacks, each with the peer that sends it."""
    if me.new_rank is None or me.new_rank not in new.stage:
        return
    copy_index = new.copy_index(me.new_rank)
    for first_holder, region in old.overlaps(new.region(me.new_rank)):
        if _holds(old, first_holder, me.old_rank):
            continue
        living = fleet.living_holders(old, first_holder)
        if not living:
            raise InvalidRelayout(
                f"'{spec.name}' {region}: no living holder; re-lay out from holdings that cover it"
            )
        source = living[(first_holder + copy_index) % len(living)]
        yield region, fleet.transfer_rank[source]


def _sends(old: Sharding, new: Sharding, fleet: Fleet, me: Me) -> Iterator[tuple[Region, int]]:
    """The pieces of this worker's old region that others lack and are to have from it."""
    if me.old_rank is None or me.old_rank not in old.stage:
        return
    mine = old.first_holder(me.old_rank)
    living = fleet.living_holders(old, mine)
    first_copy = (bisect_left(living, me.old_rank) - mine) % len(living)
    for first_holder, region in new.overlaps(old.region(me.old_rank)):
        for copy_index in range(first_copy, new.num_copies, len(living)):
            receiver = new.holder(first_holder, copy_index)
            if not _holds(old, mine, fleet.old_rank_of_new[receiver]):
                yield region, receiver


def _holds(old: Sharding, first_holder: int, old_rank: int | None) -> bool:
    """Whether a living holder, by its old world rank, has this old region."""
    return (
        old_rank is not None
        and old_rank in old.stage
        and old.first_holder(old_rank) == first_holder
    )
