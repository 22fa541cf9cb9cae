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
    layout = state.held.assignment.layout if state.held else Layout()
    choice = choose(any_state(layout), _holdings(state))
    assert not isinstance(choice, Infeasible), "the initial state is always there"
    return _source(state, choice)


def live_covers(state: CoreState, without: Set[str] = frozenset()) -> bool:
    """Whether the living holders, less some, have all of the state between them."""
    held = state.held
    if held is None:
        return False
    layout = held.assignment.layout
    ranks = [rank for rank, worker in _living(held) if worker not in without]
    return uncovered(any_state(layout), layout, ranks) is None


def _source(state: CoreState, choice: Choice) -> Source:
    match choice.tier:
        case Tier.LIVE:
            assert state.held is not None
            holders = frozenset(holding.holder for holding in choice.holdings)
            return Source("live", choice.step, state.held.assignment, holders)
        case Tier.CHECKPOINT:
            return Source("checkpoint", choice.step, path=choice.holdings[0].holder)
        case _:
            return Source("initial", choice.step)


def _holdings(state: CoreState) -> Iterator[Holding]:
    yield Holding("anybody", Tier.INITIAL, 0, INITIAL_STEP, 0)
    if state.saved:
        saved = state.saved
        yield Holding(saved.path, Tier.CHECKPOINT, state.history, saved.step, saved.generation)
    if state.held:
        layout, generation = state.held.assignment.layout, state.held.assignment.generation
        step, history = state.committed_step, state.history
        for rank, worker in _living(state.held):
            place = layout.coordinates(rank)
            yield Holding(worker, Tier.LIVE, history, step, generation, layout, place)


def _living(held: Held) -> Iterator[tuple[int, str]]:
    for rank, worker in enumerate(held.assignment.members):
        if worker in held.holders:
            yield rank, worker
