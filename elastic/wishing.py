"""A wish for another layout while the run goes on: refused with a reason, or taken up in time.

What is refused leaves everything as it is. What is accepted holds from the next forming on; who
trains under another layout pauses for it at the next step boundary.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from elastic.commands import Command, LayoutAnswered
from elastic.events import LayoutRequested
from elastic.infeasible import Infeasible
from elastic.layout import Layout
from elastic.links import capacity_now, known_job
from elastic.phases import Aborting, Forming, Pausing, Relaying, Running, Saving
from elastic.planning import Choice, Wish, plan_layout
from elastic.state import CoreState, FormerWish


def on_layout_requested(state: CoreState, event: LayoutRequested) -> list[Command]:
    """Answer at once; how many workers the run may have stays as it is."""
    wish = replace(event.wish, max_workers=state.wish.max_workers)
    present, planned = _present(state), _planned(state, wish)
    refusal = _refusal(state, wish, planned)
    if not refusal:
        former = state.former_wish.wish if state.former_wish else state.wish
        state.wish, state.former_wish = wish, FormerWish(former, event.request)
        state.num_given_back = 0
    told = ("" if refusal else str(planned), str(present) if present else "")
    return [LayoutAnswered(state.generation, event.request, *told, refusal)]


def changes_layout(state: CoreState) -> bool:
    """Whether those who are there would train under another layout by now."""
    planned = _planned(state, state.wish)
    return isinstance(planned, Layout) and planned != _present(state)


def withdraw(state: CoreState, refusal: Infeasible) -> list[Command]:
    """Go back to the former wish: what came to be known since then rules the new one out."""
    former = state.former_wish
    assert former is not None
    state.wish, state.former_wish = former.wish, None
    return [LayoutAnswered(state.generation, former.request, "", "", refusal.reason)]


def _refusal(state: CoreState, wish: Wish, planned: Layout | Infeasible) -> str:
    """Why this cannot be had now, or could not at full strength; empty if it can."""
    if state.ending or isinstance(state.phase, Saving):
        return "the run is about to end"
    num_wished = wish.num_model_ranks * prod(wish.data_axes or (1,))
    if num_wished > state.policy.max_workers:
        return (
            f"it needs {num_wished} workers, the run has {state.policy.max_workers} at most: "
            "lower a degree, or resume the run with more --workers"
        )
    if isinstance(planned, Infeasible):
        return planned.reason
    best = _choose(state, wish, state.policy.max_workers)
    if isinstance(best, Infeasible):
        return best.reason
    # Not even with all workers: what the memory of those that are there does not hold.
    return "" if wish.is_met(best.layout) else best.refusals[0]


def _present(state: CoreState) -> Layout | None:
    """What is trained under, or is being formed, or was until something broke."""
    match state.phase:
        case Forming() | Relaying():
            return state.phase.attempt.assignment.layout
        case Running() | Pausing() | Aborting() if state.held:
            return state.held.assignment.layout
    return None


def _planned(state: CoreState, wish: Wish) -> Layout | Infeasible:
    """With those who are there; where nothing trains, with all who are to come."""
    present = _present(state)
    return _plan(state, wish, state.num_staying() if present else state.policy.max_workers)


def _plan(state: CoreState, wish: Wish, num_workers: int) -> Layout | Infeasible:
    choice = _choose(state, wish, num_workers)
    return choice if isinstance(choice, Infeasible) else choice.layout


def _choose(state: CoreState, wish: Wish, num_workers: int) -> Choice | Infeasible:
    capacity = replace(capacity_now(state), num_workers=num_workers)
    return plan_layout(_present(state), capacity, wish, known_job(state), snapshots_cover=False)
