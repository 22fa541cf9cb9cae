"""Restart of a controller that died alone: the run continues in the same generation."""

from __future__ import annotations

from dataclasses import replace

from elastic.duties import catch_up
from elastic.duties.checkpoints import drop_broken
from elastic.protocol.commands import Command
from elastic.protocol.controller_events import ControllerRestarted
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.phases import (
    Aborting,
    Ended,
    Forming,
    Pausing,
    Resharding,
    Running,
    Saving,
    Waiting,
)


def on_restarted(state: ControllerState, now: float, event: ControllerRestarted) -> list[Command]:
    """Continue after a restart. Deadlines move by the time that the controller was down, and
    checkpoints that were to be published are published again.

    Checkpoints given up during publication are removed now: no report about them will arrive.
    """
    state.incarnation = event.incarnation
    absence_s = max(0.0, now - event.stopped_at)
    state.shift_clock(absence_s)
    _shift_phase(state, absence_s)
    for upload in state.checkpoints.uploads.values():
        upload.is_published = False
    return drop_broken(state) + catch_up.repeat_request(state, now)


def _shift_phase(state: ControllerState, by_s: float) -> None:
    """Move all deadlines of the phase by the absence."""
    phase = state.phase
    match phase:
        case Waiting():
            phase.since += by_s
            phase.until = None if phase.until is None else phase.until + by_s
        case Forming() | Resharding():
            phase.deadline += by_s
            phase.attempt = replace(phase.attempt, started=phase.attempt.started + by_s)
        case Running():
            phase.since += by_s
            phase.last_progress += by_s
        case Pausing():
            phase.last_progress += by_s
        case Aborting():
            phase.deadline += by_s
            phase.patience += by_s
            phase.began += by_s
            phase.suspected_at += by_s
            phase.changed_at += by_s
        case Saving():
            phase.deadline += by_s
            phase.retry_at = None if phase.retry_at is None else phase.retry_at + by_s
        case Ended():
            pass
