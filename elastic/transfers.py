"""One worker's transfers in a re-layout, derived from its blob: nothing central is shipped.

`sharing` works out what this worker does for each class of tensors that lie alike; here it is
stamped out per tensor. Both sides list their pieces by tensor index, and where a sender carries
several parts, pieces of one tensor by their offsets: what A sends to B stands in the order in
which B receives it from A. No set is ever iterated (invariants 3 and 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.regions import Region
from elastic.relayout import Carried, Relayout
from elastic.shards import alike
from elastic.sharing import Fleet, Share, share_of
from elastic.specs import TensorSpec

__all__ = ["Carried", "Copy", "Piece", "Relayout", "Transfers", "derive"]


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


def derive(specs: Sequence[TensorSpec], relayout: Relayout, worker: str) -> Transfers:
    """One worker's own transfers: the same on every machine, in any process.

    Raises `InvalidRelayout` where nobody has what this worker needs.
    """
    fleet = Fleet.of(relayout)
    me = fleet.me(relayout, worker)
    assignments = (relayout.new, relayout.old) if relayout.old else (relayout.new,)
    layouts = [assignment.layout for assignment in assignments]
    shares: dict[tuple[object, ...], Share] = {}
    transfers = Transfers(me.parts[0] if me.lives else None, {part: {} for part in me.parts})
    for index, spec in enumerate(specs):
        key = alike(spec, *layouts)
        share = shares.get(key)
        if share is None:
            share = shares[key] = share_of(spec, relayout, fleet, me)
        _stamp(transfers, index, spec, share)
    return transfers


def _stamp(transfers: Transfers, index: int, spec: TensorSpec, share: Share) -> None:
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
