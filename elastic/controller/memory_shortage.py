"""Memory shortage: a worker ran out of memory, so the run continues under a layout that fits."""

from __future__ import annotations

from dataclasses import replace

from elastic.controller.capacity.next_assignment import next_assignment
from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Layout
from elastic.planner.fitting_layouts import Shortage, advice, fitting_bytes
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import WorkerRaised
from elastic.protocol.phases import Aborting, Forming, Resharding


def mark_too_big(state: ControllerState, event: WorkerRaised) -> bool:
    """Mark the layout as too big by the measured bytes, if the workers that stay can train under
    another that needs less; returns whether they can.

    The planner then refuses every layout that needs as much, until the run ends. Workers often run
    out at once: the first of a generation marks its layout.
    """
    job = state.job
    if event.generation != state.generation:
        return False
    if isinstance(state.phase, Aborting) and job.most_bytes is not None:
        return not isinstance(next_assignment(state, None), Infeasible)
    layout = layout_in_use(state)
    if layout is None:
        return False
    bound = fitting_bytes(layout, job, _shortage(event))
    if job.most_bytes is not None:
        bound = min(bound, job.most_bytes)
    state.job = replace(job, most_bytes=bound)
    proposed = next_assignment(state, None)
    if isinstance(proposed, Infeasible) or proposed.assignment.layout == layout:
        state.job = job
        return False
    return True


def describe(state: ControllerState, event: WorkerRaised) -> str:
    """The measured bytes, and a layout that would fit."""
    layout = None if isinstance(state.phase, Aborting) else layout_in_use(state)
    return advice(layout, state.job, _shortage(event)) if layout else str(_shortage(event))


def layout_in_use(state: ControllerState) -> Layout | None:
    """The layout that is being formed, or that the live state lies in."""
    phase = state.phase
    if isinstance(phase, Forming | Resharding):
        return phase.attempt.assignment.layout
    return state.live.held.assignment.layout if state.live.held else None


def _shortage(event: WorkerRaised) -> Shortage:
    return Shortage(event.held_bytes, event.wanted_bytes)
