"""Holdings, and the one rule of recovery: which of them the next generation is made from.

    Take the newest step whose holdings, together, cover every region of every tensor.

Only holdings of one (history, step) combine, and of these live workers and snapshots of one
generation, whose coordinates mean the same; a checkpoint and the initial state stand alone.
Holdings that a fall-back has voided must not be passed in.

Coverage is decided on coordinates: the ranks that are held are folded along the axes that
replicate, once for each distinct way in which tensors are cut, and the folds are counted.
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
    """Where a holding lies, from the nearest to the farthest."""

    LIVE = 0
    SNAPSHOT = 1
    CHECKPOINT = 2
    INITIAL = 3


class Holding(NamedTuple):
    """One part of the state: who has it, of which step, and which part it is.

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
    """What the next generation is made from; `tier` is the farthest that is needed."""

    lineage: int
    step: int
    tier: Tier
    holdings: tuple[Holding, ...]


def choose(
    specs: Sequence[TensorSpec] | None, holdings: Iterable[Holding]
) -> SourceChoice | Infeasible:
    """The newest step that is covered, from the nearest tiers that cover it.

    Candidates are tried in order of step, nearness, history and generation. Where the specs are
    not known (None), stand-ins for any state decide.
    """
    lacking = ""
    for tier, group in sorted(_candidates(holdings), key=_preference):
        first = group[0]
        state = any_state(first.layout) if specs is None else specs
        missing = uncovered(state, first.layout, _world_ranks(group))
        if missing is None:
            return SourceChoice(first.lineage, first.step, tier, tuple(group))
        lacking = lacking or f": at step {first.step} some of '{missing.name}' is nowhere"
    return Infeasible(f"no holdings cover the state{lacking}")


def uncovered(
    specs: Sequence[TensorSpec], layout: Layout, world_ranks: Iterable[int]
) -> TensorSpec | None:
    """The first tensor of which these ranks together lack some element, or None.

    Raises `InvalidSpec`.
    """
    held = sorted(set(world_ranks))
    lacking: dict[tuple[tuple[Axis, ...], range], list[int]] = {}
    judged = set()
    for spec in specs:
        key = alike(spec, layout)
        if key in judged:
            continue
        judged.add(key)
        sharding = sharding_of(spec, layout)
        fold = (sharding.copies, sharding.stage)
        if fold not in lacking:
            lacking[fold] = _lacking(sharding, held)
        if any(sharding.region(rank).num_elements for rank in lacking[fold]):
            return spec
    return None


def any_state(layout: Layout) -> tuple[TensorSpec, ...]:
    """Stand-ins for specs that are not known: optimizer state that every axis cuts.

    Ranks that cover these cover every state under this layout, one with experts if `ep` > 1.
    The reverse does not hold: a state that is cut less may be covered by fewer.
    """
    shape = (layout.fsdp * layout.tp, layout.fsdp * layout.cp * layout.tp)
    stand_in = TensorSpec("the state", shape, layer=0, fsdp_dim=0, kind="optimizer")
    stages = [
        replace(stand_in, layer=stage, layer_costs=(1,) * (layout.pp * layout.vp))
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
        near = tiers.get((lineage, step, generation, Tier.LIVE), [])
        yield tier, near + group if tier is Tier.SNAPSHOT else group


def _preference(candidate: tuple[Tier, list[Holding]]) -> tuple[int, int, int, int]:
    tier, group = candidate
    return -group[0].step, tier, -group[0].lineage, -group[0].generation


def _world_ranks(group: Sequence[Holding]) -> list[int]:
    layout = group[0].layout
    strides = [prod(layout.degrees[axis + 1 :]) for axis in range(len(layout.degrees))]
    return [sum(map(mul, holding.coordinates, strides)) for holding in group]


def _lacking(sharding: Sharding, held: Sequence[int]) -> list[int]:
    """The regions that no held rank has, by first holder."""
    stage = sharding.stage
    folded = set(held[bisect_left(held, stage.start) : bisect_left(held, stage.stop)])
    for degree, stride in sharding.copies:
        folded = {rank - rank // stride % degree * stride for rank in folded}
    if len(folded) == prod(cut.axis.degree for cut in sharding.cuts):
        return []
    return [rank for rank in sharding.first_holders() if rank not in folded]
