"""Which survivors of an assignment stay where, so that as little state as possible moves.

World ranks fall into blocks of `tp` consecutive ones, in row-major order of (pp, dp, fsdp,
cp). If pp, cp and tp are as before, a block of survivors goes to the `fsdp` index whose shard
covers the middle of its old one: to its old `dp` index there, which under the same `fsdp` is
where it was; or else, in order of `fsdp`, to the first free block whose shard overlaps. Under
the same `fsdp` nothing moves for those who stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from typing import NamedTuple

from elastic.assignment import Assignment
from elastic.layout import Layout

Block = list[str | None]
"""The workers of `tp` consecutive ranks; None is a gap."""


class _Homeless(NamedTuple):
    """A block of survivors whose own place is taken or gone."""

    fsdp: int
    num_gaps: int
    workers: Block


def stay(layout: Layout, previous: Assignment | None, members: Collection[str]) -> dict[int, Block]:
    """The blocks of the new mesh, by index, that survivors take over, with their gaps."""
    if previous is None or _model_axes(previous.layout) != _model_axes(layout):
        return {}
    blocks: dict[int, Block] = {}
    homeless: dict[tuple[int, int], list[_Homeless]] = {}
    for (pp, dp, fsdp, cp), workers in _survivors(previous, members):
        target = (2 * fsdp + 1) * layout.fsdp // (2 * previous.layout.fsdp)
        index = ((pp * layout.dp + dp) * layout.fsdp + target) * layout.cp + cp
        if dp < layout.dp and index not in blocks:
            blocks[index] = workers
        else:
            moved = _Homeless(fsdp, workers.count(None), workers)
            homeless.setdefault((pp, cp), []).append(moved)
    for (pp, cp), moving in homeless.items():
        _house(layout, previous.layout.fsdp, pp, cp, sorted(moving, key=_order), blocks)
    return blocks


def _model_axes(layout: Layout) -> tuple[int, int, int]:
    return layout.pp, layout.cp, layout.tp


def _order(moved: _Homeless) -> tuple[int, int]:
    return moved.fsdp, moved.num_gaps


def _survivors(
    previous: Assignment, members: Collection[str]
) -> list[tuple[tuple[int, ...], Block]]:
    """The old blocks that have any survivor, with (pp, dp, fsdp, cp)."""
    *degrees, tp = previous.layout.degrees
    kept: Block = [worker if worker in members else None for worker in previous.members]
    old = zip(product(*map(range, degrees)), range(0, len(kept), tp), strict=True)
    return [
        (coordinates, block) for coordinates, first in old if any(block := kept[first : first + tp])
    ]


def _house(
    layout: Layout,
    old_fsdp: int,
    pp: int,
    cp: int,
    moving: Sequence[_Homeless],
    blocks: dict[int, Block],
) -> None:
    """Sweep homeless blocks and free ones, both in order of `fsdp`, for shards that overlap."""
    free = (
        (fsdp, index)
        for fsdp, dp in product(range(layout.fsdp), range(layout.dp))
        if (index := ((pp * layout.dp + dp) * layout.fsdp + fsdp) * layout.cp + cp) not in blocks
    )
    fsdp, index = next(free, (layout.fsdp, -1))
    for moved in moving:
        first = moved.fsdp * layout.fsdp // old_fsdp
        last = ((moved.fsdp + 1) * layout.fsdp - 1) // old_fsdp
        while fsdp < first:
            fsdp, index = next(free, (layout.fsdp, -1))
        if fsdp <= last:
            blocks[index] = moved.workers
            fsdp, index = next(free, (layout.fsdp, -1))
