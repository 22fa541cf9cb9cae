"""Layout requests: a new target layout during the run is refused with a reason, or adopted.

A refused request changes nothing. An accepted one applies to the next generation. If the run trains
under another layout, it pauses for it at the next step boundary.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from elastic.duties.bandwidth import capacity_now, corrected_job
from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.planner.layout_choice import LayoutChoice, plan_layout
from elastic.protocol.commands import Command
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import FormerTarget
from elastic.protocol.events import LayoutRequested
from elastic.protocol.notes import LayoutAnswered
from elastic.protocol.phases import Aborting, Forming, Pausing, Resharding, Running, Saving


def on_layout_requested(state: ControllerState, event: LayoutRequested) -> list[Command]:
    """Answer at once; the maximum number of workers stays the same."""
    target_layout = replace(event.target_layout, max_workers=state.layouts.target.max_workers)
    present, planned = _present(state), _planned(state, target_layout)
    refusal = _refusal(state, target_layout, planned)
    if not refusal:
        former = (
            state.layouts.former.target_layout if state.layouts.former else state.layouts.target
        )
        state.layouts.target, state.layouts.former = (
            target_layout,
            FormerTarget(former, event.request),
        )
        state.growth.num_given_back = 0
    layouts = ("" if refusal else str(planned), str(present) if present else "")
    return [LayoutAnswered(state.generation, event.request, *layouts, refusal)]


def changes_layout(state: ControllerState) -> bool:
    """Whether the workers that are ready would train under another layout than the current one."""
    planned = _planned(state, state.layouts.target)
    return isinstance(planned, Layout) and planned != _present(state)


def withdraw(state: ControllerState, refusal: Infeasible) -> list[Command]:
    """Return to the former target layout, since the requested one has proved infeasible."""
    former = state.layouts.former
    assert former is not None
    state.layouts.target, state.layouts.former = former.target_layout, None
    return [LayoutAnswered(state.generation, former.request, "", "", refusal.reason)]


def _refusal(
    state: ControllerState, target_layout: TargetLayout, planned: Layout | Infeasible
) -> str:
    """Why the layout is impossible now or at full capacity; empty if it is possible."""
    if state.ending or isinstance(state.phase, Saving):
        return "the run is about to end"
    num_requested = target_layout.num_model_ranks * prod(target_layout.data_axes or (1,))
    if num_requested > state.policy.max_workers:
        return (
            f"it needs {num_requested} workers, the run has at most {state.policy.max_workers}: "
            "lower a degree, or resume the run with more --workers"
        )
    if isinstance(planned, Infeasible):
        return planned.reason
    best = _choose(state, target_layout, state.policy.max_workers)
    if isinstance(best, Infeasible):
        return best.reason
    # It fails even with all workers: the memory of those that are ready is too small.
    return "" if target_layout.is_met(best.layout) else best.refusals[0]


def _present(state: ControllerState) -> Layout | None:
    """The current layout: trained under, being formed, or trained under until an abort."""
    match state.phase:
        case Forming() | Resharding():
            return state.phase.attempt.assignment.layout
        case Running() | Pausing() | Aborting() if state.live.held:
            return state.live.held.assignment.layout
    return None


def _planned(state: ControllerState, target_layout: TargetLayout) -> Layout | Infeasible:
    """The layout for the workers that stay; while nothing trains, for all workers that may come."""
    present = _present(state)
    return _plan(
        state,
        target_layout,
        state.membership.num_staying() if present else state.policy.max_workers,
    )


def _plan(
    state: ControllerState, target_layout: TargetLayout, num_workers: int
) -> Layout | Infeasible:
    choice = _choose(state, target_layout, num_workers)
    return choice if isinstance(choice, Infeasible) else choice.layout


def _choose(
    state: ControllerState, target_layout: TargetLayout, num_workers: int
) -> LayoutChoice | Infeasible:
    capacity = replace(capacity_now(state), num_workers=num_workers)
    return plan_layout(
        _present(state), capacity, target_layout, corrected_job(state), snapshots_cover=False
    )
