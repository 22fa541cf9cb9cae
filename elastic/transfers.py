"""A re-layout: from one blob every worker derives its own transfers, and only those.

The old regions tile each tensor, so what a receiver wants falls apart into one piece for each
old region that overlaps it (found by arithmetic, see `shards`). The piece that lies in the
receiver's own old region is kept or copied in place; every other piece comes from one living
holder of that old region:

    holders[(region_index + copy_index) % len(holders)]

`holders` are the living ranks of the old assignment that hold the region, ascending;
`region_index` is the region's first holder in the old layout (dead or alive); `copy_index` is
the receiver's place among the new holders of its own region. (The receiver's plain world rank
would do, but the ranks that share a region lie `fsdp x cp x tp` apart: their remainders
coincide and a few sources would serve everybody.) A sender inverts the formula: its receivers
are every `len(holders)`-th new holder. So no worker looks at all the others.

All of it is done once for each class of tensors that lie alike, and stamped out per tensor. A
sender has at most one piece of a tensor for one receiver, and both list their pieces by
tensor index: what A sends to B stands in the order in which B receives it from A. No set is
ever iterated (invariants 3 and 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.assignment import Assignment
from elastic.errors import InvalidRelayout
from elastic.regions import Region
from elastic.shards import Axis, Sharding, sharding_of, stage_of
from elastic.specs import TensorSpec


@dataclass(frozen=True, slots=True)
class Relayout:
    """The blob of one generation: state of (history, step) goes from `old` to `new`.

    `holders` are the living workers whose part under `old` is whole. With `old=None` or no
    holders nothing moves between workers: each reads its regions from storage.

    Raises `InvalidRelayout` if a holder was no member of `old`.
    """

    history: int
    step: int
    old: Assignment | None
    new: Assignment
    holders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = set(self.old.members) if self.old else set()
        strangers = sorted(set(self.holders) - known)
        if strangers:
            raise InvalidRelayout(
                f"{', '.join(strangers)}: named as holders, but no members of the old assignment"
            )

    @property
    def participants(self) -> tuple[str, ...]:
        """The transfer group: new members by world rank, then the other holders, sorted."""
        members = set(self.new.members)
        return self.new.members + tuple(sorted(w for w in self.holders if w not in members))

    def transfer_rank(self, worker: str) -> int:
        return self.participants.index(worker)


class Piece(NamedTuple):
    """A part of one tensor that goes to, or comes from, another worker."""

    tensor: int
    """Index into the specs."""
    region: Region
    """In the logical tensor's coordinates."""
    peer: int
    """Transfer rank."""


class Copy(NamedTuple):
    """A part of one tensor that goes from a worker's old region to its own new one."""

    tensor: int
    region: Region


@dataclass(slots=True)
class Transfers:
    """What one worker does in a re-layout; regions in logical coordinates.

    A new region that is not `kept` is made of its `copies` and `receives`, each element
    exactly once. `bytes_needed` counts what this worker will hold and does not hold already:
    the lower bound of what must reach it; `bytes_moved` counts its receives.
    """

    old_regions: dict[int, Region] = field(default_factory=dict)
    """What the worker holds, by index into the specs; nothing if it is no living holder."""
    new_regions: dict[int, Region] = field(default_factory=dict)
    """What it shall hold; nothing if it is no new member."""
    kept: set[int] = field(default_factory=set)
    """Tensors whose region is unchanged: the same memory goes on. For look-up only."""
    copies: list[Copy] = field(default_factory=list)
    sends: list[Piece] = field(default_factory=list)
    receives: list[Piece] = field(default_factory=list)
    bytes_moved: int = 0
    bytes_needed: int = 0


def derive(specs: Sequence[TensorSpec], relayout: Relayout, worker: str) -> Transfers:
    """One worker's own transfers: the same on every machine, in any process.

    Raises `InvalidRelayout` where no living holder has what this worker needs.
    """
    fleet = _Fleet.of(relayout)
    me = _Me(fleet.old_rank.get(worker), fleet.new_rank.get(worker))
    shares: dict[tuple[object, ...], _Share] = {}
    transfers = Transfers()
    for index, spec in enumerate(specs):
        key = _class_of(spec, relayout)
        share = shares.get(key)
        if share is None:
            share = shares[key] = _share(spec, relayout, fleet, me)
        _stamp(transfers, index, spec, share)
    return transfers


class _Me(NamedTuple):
    """The deriving worker's world ranks: as a living holder, and as a new member."""

    old_rank: int | None
    new_rank: int | None


@dataclass(frozen=True, slots=True)
class _Fleet:
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
    def of(cls, relayout: Relayout) -> _Fleet:
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


class _Share(NamedTuple):
    """What one worker does for every tensor of a class."""

    old_region: Region | None
    new_region: Region | None
    kept: bool
    copies: list[Region]
    sends: list[tuple[Region, int]]
    receives: list[tuple[Region, int]]
    num_moved: int
    num_needed: int


def _class_of(spec: TensorSpec, relayout: Relayout) -> tuple[object, ...]:
    """Tensors with the same key lie alike under both assignments."""
    return (
        spec.shape,
        spec.fsdp_dim,
        spec.tp_dim,
        spec.ep_dim,
        spec.kind,
        spec.layer is None,
        stage_of(spec, relayout.new.layout),
        stage_of(spec, relayout.old.layout) if relayout.old else None,
    )


def _share(spec: TensorSpec, relayout: Relayout, fleet: _Fleet, me: _Me) -> _Share:
    new = sharding_of(spec, relayout.new.layout)
    new_region = _region(new, me.new_rank)
    if relayout.old is None or not relayout.holders:
        num_needed = new_region.num_elements if new_region else 0
        return _Share(None, new_region, False, [], [], [], 0, num_needed)
    old = sharding_of(spec, relayout.old.layout)
    old_region = _region(old, me.old_rank)
    kept = new_region is not None and new_region == old_region
    common = new_region.intersection(old_region) if new_region and old_region else None
    receives = [] if kept else list(_receives(spec, old, new, fleet, me))
    return _Share(
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
    spec: TensorSpec, old: Sharding, new: Sharding, fleet: _Fleet, me: _Me
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


def _sends(
    old: Sharding, new: Sharding, fleet: _Fleet, me: _Me
) -> Iterator[tuple[Region, int]]:
    """The pieces of this worker's old region that others lack and are to have from it."""
    if me.old_rank is None or me.old_rank not in old.stage:
        return
    mine = old.first_holder(me.old_rank)
    living = fleet.living_holders(old, mine)
    first_copy = (living.index(me.old_rank) - mine) % len(living)
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


def _stamp(transfers: Transfers, index: int, spec: TensorSpec, share: _Share) -> None:
    """Write a class's share down for one of its tensors."""
    if share.old_region is not None:
        transfers.old_regions[index] = share.old_region
    if share.new_region is not None:
        transfers.new_regions[index] = share.new_region
    if share.kept:
        transfers.kept.add(index)
    transfers.copies += [Copy(index, region) for region in share.copies]
    transfers.sends += [Piece(index, region, peer) for region, peer in share.sends]
    transfers.receives += [Piece(index, region, peer) for region, peer in share.receives]
    transfers.bytes_moved += share.num_moved * spec.itemsize_bytes
    transfers.bytes_needed += share.num_needed * spec.itemsize_bytes
