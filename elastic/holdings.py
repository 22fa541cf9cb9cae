"""Holdings, and the one rule of recovery: which of them the next generation is made from.

    Take the newest step whose holdings, together, cover every region of every tensor.

Only holdings of one (history, step) combine, and of these live workers and snapshots of one
generation, whose coordinates mean the same; a checkpoint and the initial state stand alone.
Holdings that a fall-back has voided must not be passed in.

Coverage is decided on coordinates: the ranks that are held are folded along the axes that
replicate, once for each distinct way in which tensors are cut, and the folds are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, groupby
from math import prod
from typing import NamedTuple

from elastic.infeasible import Infeasible
from elastic.layout import Coordinates, Layout
from elastic.shards import Axis, Sharding, sharding_of, stage_of
from elastic.specs import TensorSpec


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
    history: int
    step: int
    generation: int
    layout: Layout = Layout()
    coordinates: Coordinates = Coordinates()


@dataclass(frozen=True, slots=True)
class Choice:
    """What the next generation is made from; `tier` is the farthest that is needed."""

    history: int
    step: int
    tier: Tier
    holdings: tuple[Holding, ...]


def choose(specs: Sequence[TensorSpec], holdings: Iterable[Holding]) -> Choice | Infeasible:
    """The newest step that is covered, from the nearest tiers that cover it.

    Candidates are weighed by (step, nearer tier, history, generation).
    """
    lacking = ""
    for tier, group in sorted(_candidates(holdings), key=_preference):
        first = group[0]
        missing = uncovered(specs, first.layout, map(_world_rank(first.layout), group))
        if missing is None:
            return Choice(first.history, first.step, tier, tuple(group))
        lacking = lacking or f": at step {first.step} nobody has all of '{missing.name}'"
    return Infeasible(f"no holdings cover the state{lacking}")
