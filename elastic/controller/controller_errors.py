"""Unexpected exceptions in the controller: the third in a row at one place ends the run.

Until then the run saves and continues. Exceptions are counted by place: the class of the event or
command. The counts are part of the state, so they survive a restart of the controller and a resume.
"""

from __future__ import annotations

from elastic.controller.aborting import abort
from elastic.controller.forming import form_or_end
from elastic.controller.restart import on_restarted
from elastic.controller.running import stop_at_boundary
from elastic.duties.checkpoints import is_saved
from elastic.protocol.commands import Command
from elastic.protocol.controller_events import (
    ControllerRaised,
    ControllerRecovered,
    ControllerRestarted,
)
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.phases import Ended, Ending, Forming, Resharding, Running, Waiting

MAX_IN_A_ROW = 3


def count_error(state: ControllerState, event: ControllerRaised) -> None:
    """Count an exception; the third in a row at its place ends the run."""
    count = state.errors.counts.get(event.place, 0) + 1
    state.errors.counts[event.place] = count
    if count >= MAX_IN_A_ROW:
        reason = f"the controller failed {count} times in a row at {event.place}: {event.message}"
        former = state.ending or Ending("failed")
        outcome = "failed" if former.outcome == "completed" else former.outcome
        reasons = [text for text in (former.reason, reason) if text]
        state.errors.has_failed = True
        if not former.traceback:
            state.ending = Ending(outcome, "; ".join(reasons), event.traceback)


def on_controller(
    state: ControllerState,
    now: float,
    event: ControllerRestarted | ControllerRaised | ControllerRecovered,
) -> list[Command]:
    """Handle what the controller reports about itself."""
    match event:
        case ControllerRestarted():
            return on_restarted(state, now, event)
        case ControllerRaised():
            return _on_raised(state, now, event)
        case ControllerRecovered():
            state.errors.counts.pop(event.place, None)
    return []


def _on_raised(state: ControllerState, now: float, event: ControllerRaised) -> list[Command]:
    """Save at the next step boundary, since the next exception may be worse. If the run ends, abort
    a generation that does not train yet."""
    count_error(state, event)
    if is_failing(state) and isinstance(state.phase, Forming | Resharding):
        return abort(state, now, f"the controller failed at {event.place}")
    if not (state.ending or isinstance(state.phase, Ended) or is_saved(state)):
        state.checkpoints.want_save(now)
    return []


def is_given_up(state: ControllerState, place: str) -> bool:
    """Whether the controller no longer retries at this place."""
    return state.errors.counts.get(place, 0) >= MAX_IN_A_ROW


def continue_to_end(state: ControllerState, now: float) -> list[Command]:
    """After fatal controller errors, follow up only with what saves and ends the run."""
    match state.phase:
        case Waiting():
            return form_or_end(state, now)
        case Running():
            return stop_at_boundary(state, now)
    return []


def is_failing(state: ControllerState) -> bool:
    """Whether the controller's own exceptions end the run: then it only saves and ends."""
    return state.errors.has_failed
