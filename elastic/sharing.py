"""What one worker keeps, sends and receives of all tensors that lie alike.

A part is what one old world rank holds; it is with that worker if it lives, or with the one that
carries its snapshot. The old regions tile each tensor, so what a receiver wants falls apart into
one piece for each old region that overlaps it (found by arithmetic, see `shards`). A piece of
which the receiver has the part is kept or copied in place; every other comes from one holder of
that old region:

    holders[(region_index + copy_index) % len(holders)]

`holders` are the old ranks that hold the region and whose parts are there, ascending;
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
    """The deriving worker: the old world ranks whose parts it has, its own first if it lives and
    holds that; and its new world rank."""

    parts: tuple[int, ...]
    lives: bool
    new_rank: int | None


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who is who in a re-layout."""

    parts: dict[str, tuple[int, ...]]
    """The old world ranks whose parts each worker has."""
    new_rank: dict[str, int]
    parts_of_new: list[tuple[int, ...]]
    """The same, by new world rank."""
    transfer_rank: dict[int, int]
    """Who has a part, by its old world rank."""
    are_carried: bool
    """Whether some worker may have several parts."""
    living: dict[tuple[tuple[Axis, ...], int], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, relayout: Relayout) -> Fleet:
        holders = set(relayout.holders)
        old = relayout.old.members if relayout.old else ()
        parts: dict[str, tuple[int, ...]] = {
            worker: (rank,) for rank, worker in enumerate(old) if worker in holders
        }
        if relayout.carried:
            rank_of = {worker: rank for rank, worker in enumerate(old)}
            for part in relayout.carried:
                parts[part.carrier] = (*parts.get(part.carrier, ()), rank_of[part.member])
        transfer_rank = {worker: i for i, worker in enumerate(relayout.participants)}
        return cls(
            parts,
            {worker: rank for rank, worker in enumerate(relayout.new.members)},
            [parts.get(worker, ()) for worker in relayout.new.members],
            {rank: transfer_rank[worker] for worker, ranks in parts.items() for rank in ranks},
            bool(relayout.carried),
        )

    def me(self, relayout: Relayout, worker: str) -> Me:
        lives = worker in relayout.holders
        return Me(self.parts.get(worker, ()), lives, self.new_rank.get(worker))

    def living_holders(self, sharding: Sharding, first_holder: int) -> list[int]:
        """Old world ranks that hold a region and whose parts are there, ascending."""
        key = (sharding.copies, first_holder)
        if key not in self.living:
            ranks = sharding.holders(first_holder)
            self.living[key] = [rank for rank in ranks if rank in self.transfer_rank]
        return self.living[key]


class Share(NamedTuple):
    """What one worker does for every tensor of a class; parts by old world rank."""

    old_regions: list[tuple[int, Region]]
    new_region: Region | None
    kept: bool
    copies: list[tuple[Region, int]]
    """Each with the part of which it is."""
    sends: list[tuple[Region, int, int]]
    """Each with the peer and the part."""
    receives: list[tuple[Region, int, int]]
    num_moved: int
    num_needed: int


def share_of(spec: TensorSpec, relayout: Relayout, fleet: Fleet, me: Me) -> Share:
    """This worker's share in moving any tensor that lies like `spec`.

    Raises `InvalidRelayout` where nobody has what this worker needs.
    """
    new = sharding_of(spec, relayout.new.layout)
    new_region = None
    if me.new_rank is not None and me.new_rank in new.stage:
        new_region = new.region(me.new_rank)
    num_wanted = new_region.num_elements if new_region else 0
    if relayout.old is None or not fleet.parts:
        return Share([], new_region, False, [], [], [], 0, num_wanted)
    old = sharding_of(spec, relayout.old.layout)
    old_regions = [(part, old.region(part)) for part in me.parts if part in old.stage]
    kept = bool(me.lives and old_regions and old_regions[0] == (me.parts[0], new_region))
    copies, receives = ([], []) if kept else _gathered(spec, old, new, fleet, me)
    sends = list(_sends(old, new, fleet, me))
    if fleet.are_carried:
        # A peer may have several pieces of a tensor for another: both list them by offsets.
        receives.sort(key=lambda piece: piece[0].offsets)
        sends.sort(key=lambda piece: piece[0].offsets)
    in_place = num_wanted if kept else sum(region.num_elements for region, _ in copies)
    num_moved = sum(region.num_elements for region, *_ in receives)
    return Share(
        old_regions, new_region, kept, copies, sends, receives, num_moved, num_wanted - in_place
    )


def _gathered(
    spec: TensorSpec, old: Sharding, new: Sharding, fleet: Fleet, me: Me
) -> tuple[list[tuple[Region, int]], list[tuple[Region, int, int]]]:
    """The pieces of this worker's new region: those it has, and those that peers send."""
    copies: list[tuple[Region, int]] = []
    receives: list[tuple[Region, int, int]] = []
    if me.new_rank is None or me.new_rank not in new.stage:
        return copies, receives
    copy_index = new.copy_index(me.new_rank)
    for first_holder, region in old.overlaps(new.region(me.new_rank)):
        part = _part_with(old, first_holder, me.parts)
        if part is not None:
            copies.append((region, part))
            continue
        living = fleet.living_holders(old, first_holder)
        if not living:
            raise InvalidRelayout(
                f"'{spec.name}' {region}: no living holder; re-lay out from holdings that cover it"
            )
        source = living[(first_holder + copy_index) % len(living)]
        receives.append((region, fleet.transfer_rank[source], source))
    return copies, receives


def _sends(old: Sharding, new: Sharding, fleet: Fleet, me: Me) -> Iterator[tuple[Region, int, int]]:
    """The pieces of this worker's parts that others lack and are to have from it."""
    for part in me.parts:
        if part not in old.stage:
            continue
        mine = old.first_holder(part)
        living = fleet.living_holders(old, mine)
        first_copy = (bisect_left(living, part) - mine) % len(living)
        for first_holder, region in new.overlaps(old.region(part)):
            for copy_index in range(first_copy, new.num_copies, len(living)):
                receiver = new.holder(first_holder, copy_index)
                if _part_with(old, mine, fleet.parts_of_new[receiver]) is None:
                    yield region, receiver, part


def _part_with(old: Sharding, first_holder: int, parts: tuple[int, ...]) -> int | None:
    """The first of these parts that has this old region, if any."""
    for part in parts:
        if part in old.stage and old.first_holder(part) == first_holder:
            return part
    return None
