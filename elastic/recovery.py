"""Recovery is one rule: the newest step whose holdings, together, cover every region.

This is where the core's own knowledge becomes holdings for that rule: who lives, what is saved,
and that the initial state can always be made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from elastic.assignment import Assignment
from elastic.holdings import Holding, Tier, any_state, choose, uncovered
from elastic.infeasible import Infeasible
from elastic.layout import Layout
from elastic.state import CoreState, Held

INITIAL_STEP = 0


@dataclass(frozen=True, slots=True)
class Source:
    """Where the next generation's state comes from: `live`, `checkpoint` or `initial`.

    `old` and `holders` are told of a live source, `path` of a checkpoint.
    """

    kind: str
    step: int
    old: Assignment | None = None
    holders: frozenset[str] = frozenset()
    path: str = ""


def choose_source(state: CoreState) -> Source:
    """What the next generation is made from.

    The living stand at the committed step, and nothing durable is newer: where they cover the
    state they are the newest holdings. Else the rule decides among what lasts.
    """
    held = living(state)
    if held:
        return Source("live", state.committed_step, held.assignment, frozenset(held.holders))
    choice = choose(any_state(Layout()), _lasting(state))
    assert not isinstance(choice, Infeasible), "the initial state is always there"
    if choice.tier is Tier.CHECKPOINT:
        return Source("checkpoint", choice.step, path=choice.holdings[0].holder)
    return Source("initial", choice.step)


def living(state: CoreState, without: Set[str] = frozenset()) -> Held | None:
    """The live holdings that have all of the state between them, also without some workers."""
    return next((held for held in state.holdings() if _covers(held, without)), None)


def _covers(held: Held, without: Set[str]) -> bool:
    layout, there = held.assignment.layout, held.holders - without
    ranks = (rank for rank, worker in enumerate(held.assignment.members) if worker in there)
    return uncovered(any_state(layout), layout, ranks) is None


def _lasting(state: CoreState) -> Iterator[Holding]:
    yield Holding("anybody", Tier.INITIAL, 0, INITIAL_STEP, 0)
    if state.saved:
        saved = state.saved
        yield Holding(saved.path, Tier.CHECKPOINT, state.history, saved.step, saved.generation)
