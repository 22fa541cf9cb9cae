"""Training and pausing: count committed steps, notice hangs, and pause at a step boundary."""

from __future__ import annotations

from dataclasses import replace

from elastic.controller.capacity.growth import note_pause, should_grow
from elastic.controller.capacity.newcomers import trust_members
from elastic.controller.drain import drain_at_once, is_too_late_to_pause, members_drain
from elastic.controller.forming import form_or_end
from elastic.duties import catch_up
from elastic.duties.checkpoints import expect_parts, note_held_out_loss
from elastic.duties.hang_recovery import hang_patience_s
from elastic.duties.layout_requests import changes_layout
from elastic.duties.loss_monitor import commit, warn_of_evaluation
from elastic.duties.membership import note_change
from elastic.duties.snapshots import drop_older
from elastic.planner.models.measured_steps import NUM_RECENT
from elastic.protocol.commands import Command, Pause
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Evaluated, Paused, Progressed, StepCommitted
from elastic.protocol.notes import StepTimeCompared
from elastic.protocol.phases import Aborting, Ending, Pausing, Running
from elastic.protocol.step_records import RecordsSent


def on_steps_reported(
    state: ControllerState, now: float, event: StepCommitted | RecordsSent
) -> list[Command]:
    """Steps have committed: world rank 0 reports one, or a worker sends requested records."""
    if isinstance(event, RecordsSent):
        return _on_records_sent(state, now, event)
    return _on_step_committed(state, now, event)


def _on_step_committed(state: ControllerState, now: float, event: StepCommitted) -> list[Command]:
    record = event.record
    if event.generation != state.generation or record.step <= state.committed_step:
        return []
    if not isinstance(state.phase, Running | Pausing | Aborting):
        expect_parts(state, now, event.vote)
        return []  # the survivors recompute this step: none of them has seen its vote
    catch_up.note_vote(state, event.vote)
    _progress(state, now)
    state.steps.boundary_at = now
    if record.step > state.committed_step + 1:
        expect_parts(state, now, event.vote)
        return _close_gap(state, now, record.step)
    commands = commit(state, record)
    if record.step_s is not None:
        costs, is_writing = state.checkpoints.costs, bool(state.checkpoints.uploads)
        costs.note_step(record.step_s, state.steps.measured.median_s() or record.step_s, is_writing)
        commands += _time(state, record.step_s)
        note_pause(state, now, record.step_s)
    if isinstance(state.phase, Running):
        if not state.phase.num_commits:
            trust_members(state)
            state.steps.first_s = max(state.steps.first_s, now - state.phase.since)
        state.phase.num_commits += 1
    expect_parts(state, now, event.vote)
    return commands + drop_older(state)


def _on_records_sent(state: ControllerState, now: float, event: RecordsSent) -> list[Command]:
    """Steps committed while the controller could not receive reports."""
    if state.steps.catch_up is None or event.generation != state.generation:
        return []
    first = state.committed_step + 1
    commands = catch_up.on_records_sent(state, now, event)
    if state.committed_step >= first:
        is_next = state.steps.unheard[1] == first - 1
        state.steps.unheard = (state.steps.unheard[0] if is_next else first, state.committed_step)
    for record in event.records[-NUM_RECENT:]:
        if record.step_s is not None:
            commands += _time(state, record.step_s)
    _progress(state, now)
    return commands + drop_older(state)


def on_caught_up(state: ControllerState, now: float) -> list[Command]:
    """The controller has the records up to the boundary of the pause. Continue if all members have
    paused: some may not have arrived yet."""
    phase = state.phase
    if not isinstance(phase, Pausing) or not phase.is_whole:
        return []
    phase.pending = set()
    return _end_pause(state, now)


def on_progressed(
    state: ControllerState, now: float, event: Progressed | Evaluated
) -> list[Command]:
    if event.generation != state.generation:
        return []
    _progress(state, now)
    if not isinstance(event, Evaluated):
        return []
    is_known = isinstance(state.phase, Running | Pausing | Aborting)
    if event.step > state.committed_step and not is_known:
        return []  # the step will be computed and evaluated again
    state.evaluated_step = max(state.evaluated_step, event.step)
    note_held_out_loss(state, event)
    return warn_of_evaluation(event)


def on_paused(state: ControllerState, now: float, event: Paused) -> list[Command]:
    """A member has paused; when all have, continue."""
    if event.generation != state.generation:
        return []
    if isinstance(state.phase, Running):
        # The last step needs no pause request: every worker stops there by itself.
        state.enter(Pausing("completed", set(state.live.members()), now))
    phase = state.phase
    if not isinstance(phase, Pausing) or phase.is_whole:
        return []
    phase.pending.discard(event.worker)
    if phase.pending:
        return []
    phase.is_whole = True
    if event.is_last and not state.rollbacks.request:
        state.job = replace(state.job, steps=event.step)
    if state.committed_step < event.step:
        return _close_gap(state, now, event.step)
    return _end_pause(state, now)


def _end_pause(state: ControllerState, now: float) -> list[Command]:
    if state.committed_step >= state.job.steps and not state.rollbacks.request:
        state.ending = state.ending or Ending("completed")
    return form_or_end(state, now)


def stop_at_boundary(state: ControllerState, now: float) -> list[Command]:
    """Order a pause if the run shall end, roll back, or change its layout or its members."""
    assert isinstance(state.phase, Running)
    cause = ""
    if state.ending:
        cause = state.ending.reason or state.ending.outcome
    elif state.rollbacks.request:
        cause = state.rollbacks.request.cause
    elif members_drain(state):
        if is_too_late_to_pause(state, now):
            return drain_at_once(state, now)
        cause = "members drain"
        note_change(state, now)
    elif state.layouts.former:
        cause = "a new target layout" if changes_layout(state) else ""
        if not cause:
            state.layouts.former = None  # the next forming would clear it
    elif should_grow(state, now):
        cause = "growth"
    elif state.stragglers.dealing.generation == state.generation:
        cause = "microbatches are dealt by the speed of the workers"
    if not cause:
        return []
    members = state.live.members()
    state.growth.paused_at = state.phase.last_progress
    state.enter(Pausing(cause, set(members), state.phase.last_progress))
    return [Pause(state.generation, members, cause)]


def hang_deadline(state: ControllerState, phase: Running | Pausing) -> float:
    return phase.last_progress + hang_patience_s(state)


def _time(state: ControllerState, step_s: float) -> list[Command]:
    """Note a step's time, and compare it with the prediction once there are enough."""
    assignment = state.live.held.assignment if state.live.held else None
    layout, shares = (assignment.layout, assignment.shares) if assignment else (None, ())
    state.steps.measured.note(layout, step_s, shares)
    expected = state.steps.measured.compare()
    if expected is None:
        return []
    median_s = state.steps.measured.median_s()
    return [StepTimeCompared(state.generation, str(layout), expected.seconds, median_s)]


def _close_gap(state: ControllerState, now: float, target: int) -> list[Command]:
    """Request the records of lost reports from a worker. A generation that trains continues."""
    if not isinstance(state.phase, Running | Pausing):
        return []  # after an abort, the workers' reports carry their steps
    return catch_up.begin(state, now, target)


def _progress(state: ControllerState, now: float) -> None:
    if isinstance(state.phase, Running | Pausing):
        state.phase.last_progress = now
