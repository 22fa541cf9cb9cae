"""Transfers of one worker in a reshard, which the worker derives itself from the reshard plan.

`derive` is the entry point. It computes a `ShardExchange` once for each class of tensors with
equal sharding and repeats it for every tensor of the class. A *part* is everything that one old
world rank held; a worker has its own part, parts carried out of snapshots, or none.

Sender and receiver list their pieces in the same order: by tensor index, and by offsets within
a tensor if a sender has several parts. So the n-th piece that A sends to B is the n-th that B
receives from A. The code never iterates over a set (invariants 3 and 4).
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


class Piece(NamedTuple):
    """A region of one tensor that this worker sends to, or receives from, another worker."""

    tensor: int
    """Index into the specs."""
    region: Region
    """In the coordinates of the logical tensor."""
    peer: int
    """Transfer rank of the other worker."""
    part: int
    """The old world rank from whose part the sender takes the region."""


class Copy(NamedTuple):
    """A region of one tensor that a worker copies from a part it has to its own new region."""

    tensor: int
    region: Region
    part: int


@dataclass(slots=True)
class Transfers:
    """What one worker does in a reshard; regions are in the coordinates of the logical tensors.

    `copies` and `receives` fill each new region that is not `kept`, each element exactly once.
    `bytes_needed` counts the bytes that this worker will hold and does not hold yet, the lower
    bound of what it must receive. `bytes_moved` counts what it receives.
    """

    own_part: int | None = None
    """The worker's old world rank, if it is a live holder."""
    old_regions: dict[int, dict[int, Region]] = field(default_factory=dict)
    """By part, own or carried, and then by index into the specs: the regions that it has."""
    new_regions: dict[int, Region] = field(default_factory=dict)
    """The regions that it will hold; empty if it is no new member."""
    kept: set[int] = field(default_factory=set)
    """Tensors of its own part whose region is unchanged and stays in the same memory. Only for
    look-up, never for iteration."""
    copies: list[Copy] = field(default_factory=list)
    sends: list[Piece] = field(default_factory=list)
    receives: list[Piece] = field(default_factory=list)
    bytes_moved: int = 0
    bytes_needed: int = 0

    @property
    def own_regions(self) -> dict[int, Region]:
        """The regions of its own part; empty if it is no live holder."""
        return {} if self.own_part is None else self.old_regions[self.own_part]


def derive(specs: Sequence[TensorSpec], reshard: ReshardPlan, worker: str) -> Transfers:
    """The transfers of one worker: the same on every machine and in any process.

    Raises `InvalidReshard` if no holder has a region that this worker needs.
    """
    holders = ShardHolders.of(reshard)
    this = holders.this_worker(reshard, worker)
    assignments = (reshard.new, reshard.old) if reshard.old else (reshard.new,)
    layouts = [assignment.layout for assignment in assignments]
    exchanges: dict[tuple[object, ...], ShardExchange] = {}
    own_part = this.parts[0] if this.is_live_holder else None
    transfers = Transfers(own_part, {part: {} for part in this.parts})
    for index, spec in enumerate(specs):
        key = alike(spec, *layouts)
        exchange = exchanges.get(key)
        if exchange is None:
            exchange = exchanges[key] = shard_exchange_of(spec, reshard, holders, this)
        _add(transfers, index, spec, exchange)
    return transfers


def _add(transfers: Transfers, index: int, spec: TensorSpec, exchange: ShardExchange) -> None:
    """Add the exchange of a class for one of its tensors."""
    for part, region in exchange.old_regions:
        transfers.old_regions[part][index] = region
    if exchange.new_region is not None:
        transfers.new_regions[index] = exchange.new_region
    if exchange.kept:
        transfers.kept.add(index)
    transfers.copies += [Copy(index, *copy) for copy in exchange.copies]
    transfers.sends += [Piece(index, *piece) for piece in exchange.sends]
    transfers.receives += [Piece(index, *piece) for piece in exchange.receives]
    transfers.bytes_moved += exchange.num_moved * spec.itemsize_bytes
    transfers.bytes_needed += exchange.num_needed * spec.itemsize_bytes


class ThisWorker(NamedTuple):
    """The worker that derives its transfers."""

    parts: tuple[int, ...]
    """The old world ranks whose parts it has; its own is the first if it is a live holder."""
    is_live_holder: bool
    new_rank: int | None


@dataclass(frozen=True, slots=True)
class ShardHolders:
    """Which worker has which parts, and the ranks of the workers, in a reshard."""

    parts: dict[str, tuple[int, ...]]
    """By worker: the old world ranks whose parts it has."""
    new_rank: dict[str, int]
    parts_of_new: list[tuple[int, ...]]
    """The same as `parts`, by new world rank."""
    transfer_rank: dict[int, int]
    """By old world rank: the transfer rank of the worker that has its part."""
    are_carried: bool
    """Whether a worker may have several parts."""
    available: dict[tuple[tuple[Axis, ...], int], list[int]] = field(default_factory=dict)
    """Cache of `available_holders`."""

    @classmethod
    def of(cls, reshard: ReshardPlan) -> ShardHolders:
        holders = set(reshard.holders)
        old = reshard.old.members if reshard.old else ()
        parts: dict[str, tuple[int, ...]] = {
            worker: (rank,) for rank, worker in enumerate(old) if worker in holders
        }
        if reshard.carried:
            old_rank = {worker: rank for rank, worker in enumerate(old)}
            for carried in reshard.carried:
                part = old_rank[carried.member]
                parts[carried.carrier] = (*parts.get(carried.carrier, ()), part)
        transfer_rank = {worker: i for i, worker in enumerate(reshard.participants)}
        return cls(
            parts,
            {worker: rank for rank, worker in enumerate(reshard.new.members)},
            [parts.get(worker, ()) for worker in reshard.new.members],
            {rank: transfer_rank[worker] for worker, ranks in parts.items() for rank in ranks},
            bool(reshard.carried),
        )

    def this_worker(self, reshard: ReshardPlan, worker: str) -> ThisWorker:
        is_live_holder = worker in reshard.holders
        return ThisWorker(self.parts.get(worker, ()), is_live_holder, self.new_rank.get(worker))

    def available_holders(self, sharding: Sharding, first_holder: int) -> list[int]:
        """Old world ranks that held a region and whose parts some worker has, ascending."""
        key = (sharding.copies, first_holder)
        if key not in self.available:
            ranks = sharding.holders(first_holder)
            self.available[key] = [rank for rank in ranks if rank in self.transfer_rank]
        return self.available[key]


class ShardExchange(NamedTuple):
    """What one worker does for every tensor of a class; parts are named by old world rank."""

    old_regions: list[tuple[int, Region]]
    """Each with its part first."""
    new_region: Region | None
    kept: bool
    copies: list[tuple[Region, int]]
    """Each with the part that it comes from."""
    sends: list[tuple[Region, int, int]]
    """Each with the peer and the part."""
    receives: list[tuple[Region, int, int]]
    """Each with the peer and the part."""
    num_moved: int
    num_needed: int


def shard_exchange_of(
    spec: TensorSpec, reshard: ReshardPlan, holders: ShardHolders, this: ThisWorker
) -> ShardExchange:
    """What this worker does for any tensor with the same sharding as `spec`.

    Raises `InvalidReshard` if no holder has a region that this worker needs.
    """
    new = sharding_of(spec, reshard.new.layout)
    new_region = None
    if this.new_rank is not None and new.is_held_by(this.new_rank):
        new_region = new.region(this.new_rank)
    num_wanted = new_region.num_elements if new_region else 0
    if reshard.old is None or not holders.parts:
        return ShardExchange([], new_region, False, [], [], [], 0, num_wanted)
    old = sharding_of(spec, reshard.old.layout)
    old_regions = [(part, old.region(part)) for part in this.parts if old.is_held_by(part)]
    own = (this.parts[0], new_region) if this.is_live_holder else None
    kept = bool(old_regions and old_regions[0] == own)
    copies, receives = ([], []) if kept else _gather(spec, old, new, holders, this)
    sends = list(_sends(old, new, holders, this))
    if holders.are_carried:
        # A peer may have several pieces of a tensor for another: both list them by offsets.
        receives.sort(key=lambda piece: piece[0].offsets)
        sends.sort(key=lambda piece: piece[0].offsets)
    num_in_place = num_wanted if kept else sum(region.num_elements for region, _ in copies)
    num_moved = sum(region.num_elements for region, *_ in receives)
    num_needed = num_wanted - num_in_place
    return ShardExchange(
        old_regions, new_region, kept, copies, sends, receives, num_moved, num_needed
    )


def _gather(
    spec: TensorSpec, old: Sharding, new: Sharding, holders: ShardHolders, this: ThisWorker
) -> tuple[list[tuple[Region, int]], list[tuple[Region, int, int]]]:
    """The pieces of this worker's new region: those that it has, and those that peers send."""
    copies: list[tuple[Region, int]] = []
    receives: list[tuple[Region, int, int]] = []
    if this.new_rank is None or not new.is_held_by(this.new_rank):
        return copies, receives
    copy_index = new.copy_index(this.new_rank)
    for first_holder, region in old.overlaps(new.region(this.new_rank)):
        part = _part_with(old, first_holder, this.parts)
        if part is not None:
            copies.append((region, part))
            continue
        available = holders.available_holders(old, first_holder)
        if not available:
            raise InvalidReshard(
                f"'{spec.name}' {region}: no live holder; choose holdings that cover the state"
            )
        source = available[(first_holder + copy_index) % len(available)]
        receives.append((region, holders.transfer_rank[source], source))
    return copies, receives


def _sends(
    old: Sharding, new: Sharding, holders: ShardHolders, this: ThisWorker
) -> Iterator[tuple[Region, int, int]]:
    """The pieces of this worker's parts that other workers lack and receive from it."""
    for part in this.parts:
        if not old.is_held_by(part):
            continue
        first_old = old.first_holder(part)
        available = holders.available_holders(old, first_old)
        first_copy = (bisect_left(available, part) - first_old) % len(available)
        for first_holder, region in new.overlaps(old.region(part)):
            for copy_index in range(first_copy, new.num_copies, len(available)):
                receiver = new.holder(first_holder, copy_index)
                if _part_with(old, first_old, holders.parts_of_new[receiver]) is None:
                    yield region, receiver, part


def _part_with(old: Sharding, first_holder: int, parts: tuple[int, ...]) -> int | None:
    """The first of these parts that has this old region, or None."""
    for part in parts:
        if old.is_held_by(part) and old.first_holder(part) == first_holder:
            return part
    return None
