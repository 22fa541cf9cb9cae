"""Recovery is one rule: the newest step whose holdings cover everything (DESIGN: holdings)."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from elastic.assignment import Assignment
from elastic.state import CoreState


@dataclass(frozen=True, slots=True)
class Source:
    """Where the next generation's state comes from: `live`, `checkpoint` or `initial`."""

    kind: str
    step: int
    old: Assignment | None = None
    holders: frozenset[str] = frozenset()
    path: str = ""


def live_covers(state: CoreState, without: Set[str] = frozenset()) -> bool:
    held = state.held
    if held is None:
        return False
    layout = held.assignment.layout
    there = set()
    for rank, w in enumerate(held.assignment.members):
        if w in held.holders and w not in without:
            c = layout.coordinates(rank)
            there.add((c.pp, c.fsdp, c.tp))
    return len(there) == layout.pp * layout.fsdp * layout.tp


def choose_source(state: CoreState) -> Source:
    held = state.held
    if held and live_covers(state):
        return Source("live", state.committed_step, held.assignment, frozenset(held.holders))
    if state.saved:
        return Source("checkpoint", state.saved.step, path=state.saved.path)
    return Source("initial", 0)
