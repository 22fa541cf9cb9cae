"""A wish for another layout while the run goes on: refused with a reason, or taken up in time.

What is refused leaves everything as it is. What is accepted holds from the next forming on; who
trains under another layout pauses for it at the next step boundary.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from elastic.duties.bandwidth import capacity_now, known_job
from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.planner.layout_choice import LayoutChoice, plan_layout
from elastic.protocol.commands import Command, LayoutAnswered
from elastic.protocol.controller_state import CoreState, FormerTarget
from elastic.protocol.events import LayoutRequested
from elastic.protocol.phases import Aborting, Forming, Pausing, Resharding, Running, Saving


def on_layout_requested(state: CoreState, event: LayoutRequested) -> list[Command]:
    """Answer at once; how many workers the run may have stays as it is."""
    target_layout = replace(event.target_layout, max_workers=state.target_layout.max_workers)
    present, planned = _present(state), _planned(state, target_layout)
    refusal = _refusal(state, target_layout, planned)
    if not refusal:
        former = state.former_target.target_layout if state.former_target else state.target_layout
        state.target_layout, state.former_target = (
            target_layout,
            FormerTarget(former, event.request),
        )
        state.num_given_back = 0
    told = ("" if refusal else str(planned), str(present) if present else "")
    return [LayoutAnswered(state.generation, event.request, *told, refusal)]


def changes_layout(state: CoreState) -> bool:
    """Whether those who are there would train under another layout by now."""
    planned = _planned(state, state.target_layout)
    return isinstance(planned, Layout) and planned != _present(state)


def withdraw(state: CoreState, refusal: Infeasible) -> list[Command]:
    """Go back to the former wish: what came to be known since then rules the new one out."""
    former = state.former_target
    assert former is not None
    state.target_layout, state.former_target = former.target_layout, None
    return [LayoutAnswered(state.generation, former.request, "", "", refusal.reason)]


def _refusal(state: CoreState, target_layout: TargetLayout, planned: Layout | Infeasible) -> str:
    """Why this cannot be had now, or could not at full strength; empty if it can."""
    if state.ending or isinstance(state.phase, Saving):
        return "the run is about to end"
    num_requested = target_layout.num_model_ranks * prod(target_layout.data_axes or (1,))
    if num_requested > state.policy.max_workers:
        return (
            f"it needs {num_requested} workers, the run has {state.policy.max_workers} at most: "
            "lower a degree, or resume the run with more --workers"
        )
    if isinstance(planned, Infeasible):
        return planned.reason
    best = _choose(state, target_layout, state.policy.max_workers)
    if isinstance(best, Infeasible):
        return best.reason
    # Not even with all workers: what the memory of those that are there does not hold.
    return "" if target_layout.is_met(best.layout) else best.refusals[0]


def _present(state: CoreState) -> Layout | None:
    """What is trained under, or is being formed, or was until something broke."""
    match state.phase:
        case Forming() | Resharding():
            return state.phase.attempt.assignment.layout
        case Running() | Pausing() | Aborting() if state.held:
            return state.held.assignment.layout
    return None


def _planned(state: CoreState, target_layout: TargetLayout) -> Layout | Infeasible:
    """With those who are there; where nothing trains, with all who are to come."""
    present = _present(state)
    return _plan(state, target_layout, state.num_staying() if present else state.policy.max_workers)


def _plan(state: CoreState, target_layout: TargetLayout, num_workers: int) -> Layout | Infeasible:
    choice = _choose(state, target_layout, num_workers)
    return choice if isinstance(choice, Infeasible) else choice.layout


def _choose(
    state: CoreState, target_layout: TargetLayout, num_workers: int
) -> LayoutChoice | Infeasible:
    capacity = replace(capacity_now(state), num_workers=num_workers)
    return plan_layout(
        _present(state), capacity, target_layout, known_job(state), snapshots_cover=False
    )
