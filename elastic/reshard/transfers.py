"""One worker's transfers in a re-layout, derived from its blob: nothing central is shipped.

`sharing` works out what this worker does for each class of tensors that lie alike; here it is
stamped out per tensor. Both sides list their pieces by tensor index, and where a sender carries
several parts, pieces of one tensor by their offsets: what A sends to B stands in the order in
which B receives it from A. No set is ever iterated (invariants 3 and 4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.geometry.errors import InvalidReshard
from elastic.geometry.regions import Region
from elastic.geometry.shard_map import Axis, Sharding, alike, sharding_of
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.reshard_plan import ReshardPlan


class ThisWorker(NamedTuple):
    """The deriving worker: the old world ranks whose parts it has, its own first if it lives and
    holds that; and its new world rank."""

    parts: tuple[int, ...]
    lives: bool
    new_rank: int | None


@dataclass(frozen=True, slots=True)
class ShardHolders:
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
    def of(cls, reshard: ReshardPlan) -> ShardHolders:
        holders = set(reshard.holders)
        old = reshard.old.members if reshard.old else ()
        parts: dict[str, tuple[int, ...]] = {
            worker: (rank,) for rank, worker in enumerate(old) if worker in holders
        }
        if reshard.carried:
            rank_of = {worker: rank for rank, worker in enumerate(old)}
            for part in reshard.carried:
                parts[part.carrier] = (*parts.get(part.carrier, ()), rank_of[part.member])
        transfer_rank = {worker: i for i, worker in enumerate(reshard.participants)}
        return cls(
            parts,
            {worker: rank for rank, worker in enumerate(reshard.new.members)},
            [parts.get(worker, ()) for worker in reshard.new.members],
            {rank: transfer_rank[worker] for worker, ranks in parts.items() for rank in ranks},
            bool(reshard.carried),
        )

    def me(self, reshard: ReshardPlan, worker: str) -> ThisWorker:
        lives = worker in reshard.holders
        return ThisWorker(self.parts.get(worker, ()), lives, self.new_rank.get(worker))

    def living_holders(self, sharding: Sharding, first_holder: int) -> list[int]:
        """Old world ranks that hold a region and whose parts are there, ascending."""
        key = (sharding.copies, first_holder)
        if key not in self.living:
            ranks = sharding.holders(first_holder)
            self.living[key] = [rank for rank in ranks if rank in self.transfer_rank]
        return self.living[key]


class ShardExchange(NamedTuple):
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


def shard_exchange_of(
    spec: TensorSpec, reshard: ReshardPlan, fleet: ShardHolders, me: ThisWorker
) -> ShardExchange:
    """This worker's share in moving any tensor that lies like `spec`.

    Raises `InvalidReshard` where nobody has what this worker needs.
    """
    new = sharding_of(spec, reshard.new.layout)
    new_region = None
    if me.new_rank is not None and me.new_rank in new.stage:
        new_region = new.region(me.new_rank)
    num_wanted = new_region.num_elements if new_region else 0
    if reshard.old is None or not fleet.parts:
        return ShardExchange([], new_region, False, [], [], [], 0, num_wanted)
    old = sharding_of(spec, reshard.old.layout)
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
    return ShardExchange(
        old_regions, new_region, kept, copies, sends, receives, num_moved, num_wanted - in_place
    )


def _gathered(
    spec: TensorSpec, old: Sharding, new: Sharding, fleet: ShardHolders, me: ThisWorker
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
            raise InvalidReshard(
                f"'{spec.name}' {region}: no living holder; re-lay out from holdings that cover it"
            )
        source = living[(first_holder + copy_index) % len(living)]
        receives.append((region, fleet.transfer_rank[source], source))
    return copies, receives


def _sends(
    old: Sharding, new: Sharding, fleet: ShardHolders, me: ThisWorker
) -> Iterator[tuple[Region, int, int]]:
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


class Piece(NamedTuple):
    """A part of one tensor that goes to, or comes from, another worker."""

    tensor: int
    """Index into the specs."""
    region: Region
    """In the logical tensor's coordinates."""
    peer: int
    """Transfer rank."""
    part: int
    """The old world rank whose part the sender takes it from."""


class Copy(NamedTuple):
    """A piece of one tensor that goes from a part that the worker has to its own new region."""

    tensor: int
    region: Region
    part: int


@dataclass(slots=True)
class Transfers:
    """What one worker does in a re-layout; regions in logical coordinates.

    A new region that is not `kept` is made of its `copies` and `receives`, each element
    exactly once. `bytes_needed` counts what this worker will hold and does not hold already:
    the lower bound of what must reach it; `bytes_moved` counts its receives.
    """

    own_part: int | None = None
    """The worker's old world rank, if it lives and holds its part."""
    old_regions: dict[int, dict[int, Region]] = field(default_factory=dict)
    """What it has of each part, its own or a carried one, by index into the specs."""
    new_regions: dict[int, Region] = field(default_factory=dict)
    """What it shall hold; nothing if it is no new member."""
    kept: set[int] = field(default_factory=set)
    """Tensors of its own part whose region is unchanged: the same memory goes on. For look-up
    only."""
    copies: list[Copy] = field(default_factory=list)
    sends: list[Piece] = field(default_factory=list)
    receives: list[Piece] = field(default_factory=list)
    bytes_moved: int = 0
    bytes_needed: int = 0

    @property
    def own_regions(self) -> dict[int, Region]:
        """What the worker itself holds; nothing if it is no living holder."""
        return {} if self.own_part is None else self.old_regions[self.own_part]


def derive(specs: Sequence[TensorSpec], reshard: ReshardPlan, worker: str) -> Transfers:
    """One worker's own transfers: the same on every machine, in any process.

    Raises `InvalidReshard` where nobody has what this worker needs.
    """
    fleet = ShardHolders.of(reshard)
    me = fleet.me(reshard, worker)
    assignments = (reshard.new, reshard.old) if reshard.old else (reshard.new,)
    layouts = [assignment.layout for assignment in assignments]
    shares: dict[tuple[object, ...], ShardExchange] = {}
    transfers = Transfers(me.parts[0] if me.lives else None, {part: {} for part in me.parts})
    for index, spec in enumerate(specs):
        key = alike(spec, *layouts)
        share = shares.get(key)
        if share is None:
            share = shares[key] = shard_exchange_of(spec, reshard, fleet, me)
        _stamp(transfers, index, spec, share)
    return transfers


def _stamp(transfers: Transfers, index: int, spec: TensorSpec, share: ShardExchange) -> None:
    """Write a class's share down for one of its tensors."""
    for part, region in share.old_regions:
        transfers.old_regions[part][index] = region
    if share.new_region is not None:
        transfers.new_regions[index] = share.new_region
    if share.kept:
        transfers.kept.add(index)
    transfers.copies += [Copy(index, *copy) for copy in share.copies]
    transfers.sends += [Piece(index, *piece) for piece in share.sends]
    transfers.receives += [Piece(index, *piece) for piece in share.receives]
    transfers.bytes_moved += share.num_moved * spec.itemsize_bytes
    transfers.bytes_needed += share.num_needed * spec.itemsize_bytes
