"""One worker's transfers in a re-layout, derived from its blob: nothing central is shipped.

`sharing` works out what this worker does for each class of tensors that lie alike; here it is
stamped out per tensor. A sender has at most one piece of a tensor for one receiver, and both
list their pieces by tensor index: what A sends to B stands in the order in which B receives
it from A. No set is ever iterated (invariants 3 and 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.regions import Region
from elastic.relayout import Relayout
from elastic.shards import alike
from elastic.sharing import Fleet, Me, Share, share_of
from elastic.specs import TensorSpec

__all__ = ["Copy", "Piece", "Relayout", "Transfers", "derive"]


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
    fleet = Fleet.of(relayout)
    me = Me(fleet.old_rank.get(worker), fleet.new_rank.get(worker))
    assignments = (relayout.new, relayout.old) if relayout.old else (relayout.new,)
    layouts = [assignment.layout for assignment in assignments]
    shares: dict[tuple[object, ...], Share] = {}
    transfers = Transfers()
    for index, spec in enumerate(specs):
        key = alike(spec, *layouts)
        share = shares.get(key)
        if share is None:
            share = shares[key] = share_of(spec, relayout, fleet, me)
        _stamp(transfers, index, spec, share)
    return transfers


def _stamp(transfers: Transfers, index: int, spec: TensorSpec, share: Share) -> None:
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
