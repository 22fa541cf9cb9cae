"""A controller that died alone is back: the run goes on where it stands, in the same generation."""

from __future__ import annotations

from dataclasses import replace

from elastic import catch_up
from elastic.commands import Command
from elastic.controller_events import ControllerRestarted
from elastic.phases import Aborting, Forming, Pausing, Relaying, Running, Saving, Stopped, Waiting
from elastic.saving import drop_broken
from elastic.state import CoreState


def on_restarted(state: CoreState, now: float, event: ControllerRestarted) -> list[Command]:
    """Nobody is late for what nobody could hear, and what was to be published is so once more.

    Of a checkpoint that was given up while it was being published nobody will tell any more.
    """
    state.incarnation = event.incarnation
    absence_s = max(0.0, now - event.stopped_at)
    _shift(state, absence_s)
    _shift_phase(state, absence_s)
    for upload in state.uploads.values():
        upload.is_published = False
    return drop_broken(state) + catch_up.repeat_request(state, now)


def _shift(state: CoreState, by_s: float) -> None:
    state.no_start_before += by_s
    state.no_keeper_before += by_s
    state.asked_until += by_s
    state.no_growth_before += by_s
    state.not_again_before += by_s
    state.changes_at = [at + by_s for at in state.changes_at]
    if state.idle_since is not None:
        state.idle_since += by_s
    if state.paused_at is not None:
        state.paused_at += by_s
    if state.spare_since is not None:
        state.spare_since += by_s
    if state.short_since is not None:
        state.short_since += by_s
    if state.protect_at is not None:
        state.protect_at += by_s
    if state.save_at is not None:
        state.save_at += by_s
    for upload in state.uploads.values():
        upload.since += by_s
        upload.deadline += by_s


def _shift_phase(state: CoreState, by_s: float) -> None:
    phase = state.phase
    match phase:
        case Waiting():
            phase.since += by_s
            phase.until = None if phase.until is None else phase.until + by_s
        case Forming():
            phase.deadline += by_s
            phase.attempt = replace(phase.attempt, started=phase.attempt.started + by_s)
        case Relaying():
            phase.deadline += by_s
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
        case Stopped():
            pass
