"""Holdings, and the recovery rule that chooses the source of the next generation from them.

    Take the newest step whose holdings, together, cover every region of every tensor.

Only holdings of one (lineage, step) combine, and live workers and snapshots only if they are of
one generation, so that their coordinates mean the same. A checkpoint and the initial state never
combine with others. The caller must not pass holdings that a rollback has voided.

Coverage is decided on coordinates: for each distinct sharding, the held ranks are folded along
the axes that replicate, and the folds are counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from operator import mul
from typing import NamedTuple

from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Coordinates, Layout
from elastic.geometry.shard_map import Axis, Sharding, alike, sharding_of
from elastic.geometry.tensor_specs import TensorSpec


class Tier(IntEnum):
    """Where a holding lies, from nearest to farthest."""

    LIVE = 0
    SNAPSHOT = 1
    CHECKPOINT = 2
    INITIAL = 3


class Holding(NamedTuple):
    """One part of the state: its holder, its step, and which part it is.

    `coordinates` are those of a rank under `layout`; `Layout()` has one rank, which holds all.
    """

    holder: str
    tier: Tier
    lineage: int
    step: int
    generation: int
    layout: Layout = Layout()
    coordinates: Coordinates = Coordinates()


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """The source of the next generation; `tier` is the farthest tier that is needed."""

    lineage: int
    step: int
    tier: Tier
    holdings: tuple[Holding, ...]


def choose(
    specs: Sequence[TensorSpec] | None, holdings: Iterable[Holding]
) -> SourceChoice | Infeasible:
    """The newest covered step, from the nearest tiers that cover it.

    Candidates are tried in order of step, nearness, lineage and generation. If the specs are not
    known (None), the specs of `substitute_specs` decide.
    """
    lacking = ""
    for tier, group in sorted(_candidates(holdings), key=_preference):
        first = group[0]
        state = substitute_specs(first.layout) if specs is None else specs
        missing = uncovered(state, first.layout, _world_ranks(group))
        if missing is None:
            return SourceChoice(first.lineage, first.step, tier, tuple(group))
        lacking = lacking or f": at step {first.step} some regions of '{missing.name}' are lost"
    return Infeasible(f"no holdings cover the state{lacking}")


def uncovered(
    specs: Sequence[TensorSpec], layout: Layout, world_ranks: Iterable[int]
) -> TensorSpec | None:
    """The first tensor of which these ranks together lack an element, or None.

    Raises `InvalidSpec`.
    """
    held = sorted(set(world_ranks))
    lacking: dict[tuple[tuple[Axis, ...], tuple[range, ...]], list[int]] = {}
    checked = set()
    for spec in specs:
        key = alike(spec, layout)
        if key in checked:
            continue
        checked.add(key)
        sharding = sharding_of(spec, layout)
        fold = (sharding.copies, sharding.stages)
        if fold not in lacking:
            lacking[fold] = _lacking(sharding, held)
        if any(sharding.region(rank).num_elements for rank in lacking[fold]):
            return spec
    return None


def substitute_specs(layout: Layout) -> tuple[TensorSpec, ...]:
    """Substitutes for unknown specs: optimizer state that every axis cuts.

    Ranks that cover these specs cover every state under this layout, also one with experts if
    `ep` > 1. The reverse does not hold: fewer ranks may cover a state that fewer axes cut.
    """
    shape = (layout.fsdp * layout.tp, layout.fsdp * layout.cp * layout.tp)
    substitute = TensorSpec("the state", shape, layer=0, fsdp_dim=0, kind="optimizer")
    stages = [
        replace(substitute, layer=stage, layer_costs=(1,) * (layout.pp * layout.vp))
        for stage in range(layout.pp)
    ]
    dense = [replace(spec, tp_dim=0) for spec in stages]
    expert = [replace(spec, fsdp_dim=1, ep_dim=1) for spec in stages if layout.ep > 1]
    return (*dense, *expert)


def _candidates(holdings: Iterable[Holding]) -> Iterator[tuple[Tier, list[Holding]]]:
    """Each set of holdings that may combine, with its farthest tier."""
    tiers: dict[tuple[int, int, int, Tier], list[Holding]] = {}
    for holding in holdings:
        key = (holding.lineage, holding.step, holding.generation, holding.tier)
        tiers.setdefault(key, []).append(holding)
    for (lineage, step, generation, tier), group in tiers.items():
        live = tiers.get((lineage, step, generation, Tier.LIVE), [])
        yield tier, live + group if tier is Tier.SNAPSHOT else group


def _preference(candidate: tuple[Tier, list[Holding]]) -> tuple[int, int, int, int]:
    tier, group = candidate
    return -group[0].step, tier, -group[0].lineage, -group[0].generation


def _world_ranks(group: Sequence[Holding]) -> list[int]:
    layout = group[0].layout
    strides = [prod(layout.degrees[axis + 1 :]) for axis in range(len(layout.degrees))]
    return [sum(map(mul, holding.coordinates, strides)) for holding in group]


def _lacking(sharding: Sharding, held: Sequence[int]) -> list[int]:
    """The first holders of the regions that no held rank has."""
    folded: set[int] = set()
    for stage in sharding.stages:
        folded.update(held[bisect_left(held, stage.start) : bisect_left(held, stage.stop)])
    for degree, stride in sharding.copies:
        folded = {rank - rank // stride % degree * stride for rank in folded}
    if len(folded) == prod(cut.axis.degree for cut in sharding.cuts):
        return []
    return [rank for rank in sharding.first_holders() if rank not in folded]
