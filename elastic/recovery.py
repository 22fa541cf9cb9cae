"""Recovery is one rule: the newest step whose holdings, together, cover every region.

This is where the core's own knowledge becomes holdings for that rule: who lives, what is saved,
and that the initial state can always be made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from elastic.assignment import Assignment
from elastic.holdings import Choice, Holding, Tier, any_state, choose, uncovered
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
    """What the next generation is made from."""
    held = living(state)
    layout = held.assignment.layout if held else Layout()
    choice = choose(any_state(layout), _holdings(state, held))
    assert not isinstance(choice, Infeasible), "the initial state is always there"
    return _source(held, choice)


def living(state: CoreState, without: Set[str] = frozenset()) -> Held | None:
    """The live holdings that have all of the state between them, also without some workers."""
    return next((held for held in state.holdings() if _covers(held, without)), None)


def _covers(held: Held, without: Set[str]) -> bool:
    layout = held.assignment.layout
    ranks = [rank for rank, worker in _holders(held) if worker not in without]
    return uncovered(any_state(layout), layout, ranks) is None


def _source(held: Held | None, choice: Choice) -> Source:
    match choice.tier:
        case Tier.LIVE:
            assert held is not None
            holders = frozenset(holding.holder for holding in choice.holdings)
            return Source("live", choice.step, held.assignment, holders)
        case Tier.CHECKPOINT:
            return Source("checkpoint", choice.step, path=choice.holdings[0].holder)
        case _:
            return Source("initial", choice.step)


def _holdings(state: CoreState, held: Held | None) -> Iterator[Holding]:
    yield Holding("anybody", Tier.INITIAL, 0, INITIAL_STEP, 0)
    if state.saved:
        saved = state.saved
        yield Holding(saved.path, Tier.CHECKPOINT, state.history, saved.step, saved.generation)
    if held:
        layout, generation = held.assignment.layout, held.assignment.generation
        step, history = state.committed_step, state.history
        for rank, worker in _holders(held):
            place = layout.coordinates(rank)
            yield Holding(worker, Tier.LIVE, history, step, generation, layout, place)


def _holders(held: Held) -> Iterator[tuple[int, str]]:
    for rank, worker in enumerate(held.assignment.members):
        if worker in held.holders:
            yield rank, worker
