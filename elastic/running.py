"""Running and pausing: count the commits, notice hangs, and stop at a boundary for a reason."""

from __future__ import annotations

from elastic.aborting import abort
from elastic.commands import Command, Pause
from elastic.events import Evaluated, Paused, Progressed, StepCommitted
from elastic.forming import go_on
from elastic.growing import note_pause, shall_grow
from elastic.judging import commit
from elastic.leaving import is_too_late_to_pause, leave_at_once, members_leave
from elastic.phases import Ending, Pausing, Running
from elastic.protecting import drop_older
from elastic.roster import note_change
from elastic.saving import expect_parts, note_loss
from elastic.state import CoreState
from elastic.wishing import changes_layout

NUM_RECENT_STEPS = 32


def on_step_committed(state: CoreState, now: float, event: StepCommitted) -> list[Command]:
    record = event.record
    if event.generation != state.generation or record.step <= state.committed_step:
        return []
    if record.step > state.committed_step + 1:
        state.last_vote = event.vote
        return _close_gap(state, now)
    commands = commit(state, record)
    state.last_vote = event.vote
    _time(state, record.step_s)
    note_pause(state, now, record.step_s)
    _progress(state, now)
    state.boundary_at = now
    if isinstance(state.phase, Running):
        state.phase.num_commits += 1
    expect_parts(state, now, event.vote)
    return commands + drop_older(state)


def on_progressed(state: CoreState, now: float, event: Progressed | Evaluated) -> None:
    if event.generation != state.generation:
        return
    if isinstance(event, Evaluated):
        state.evaluated_step = max(state.evaluated_step, event.step)
        note_loss(state, event)
    _progress(state, now)


def on_paused(state: CoreState, now: float, event: Paused) -> list[Command]:
    if event.generation != state.generation:
        return []
    if isinstance(state.phase, Running):
        # The last step needs no wish: every worker stops there by itself.
        state.enter(Pausing("completed", set(state.members()), now))
    phase = state.phase
    if not isinstance(phase, Pausing):
        return []
    phase.pending.discard(event.worker)
    if phase.pending:
        return []
    if state.committed_step < event.step:
        return _close_gap(state, now)
    if state.committed_step >= state.job.steps and not state.rewind:
        state.ending = state.ending or Ending("completed")
    return go_on(state, now)


def stop_at_boundary(state: CoreState, now: float) -> list[Command]:
    """Ask for a pause if the run shall end, change its layout, or its members."""
    assert isinstance(state.phase, Running)
    cause = ""
    if state.ending:
        cause = state.ending.reason or state.ending.outcome
    elif state.rewind:
        cause = state.rewind.cause
    elif members_leave(state):
        if is_too_late_to_pause(state, now):
            return leave_at_once(state, now)
        cause = "members leave"
        note_change(state, now)
    elif state.former_wish:
        cause = "another layout" if changes_layout(state) else ""
        if not cause:
            state.former_wish = None  # the next forming would clear it
    elif shall_grow(state, now):
        cause = "growth"
    if not cause:
        return []
    members = state.members()
    state.paused_at = state.phase.last_progress
    state.enter(Pausing(cause, set(members), state.phase.last_progress))
    return [Pause(state.generation, members, cause)]


def hang_deadline(state: CoreState, phase: Running | Pausing) -> float:
    policy = state.policy
    patience_s = max(policy.hang_timeout_s, policy.hang_factor * state.median_step_s())
    if not state.recent_step_s:
        patience_s = policy.first_step_timeout_s
    return phase.last_progress + patience_s


def _time(state: CoreState, step_s: float) -> None:
    """Times under another layout say nothing any more once there is one under this."""
    layout = state.held.assignment.layout if state.held else None
    if layout != state.timed_layout:
        state.timed_layout, state.recent_step_s = layout, []
    state.recent_step_s = [*state.recent_step_s[1 - NUM_RECENT_STEPS :], step_s]


def _close_gap(state: CoreState, now: float) -> list[Command]:
    """A report was lost; the workers' own records, handed over when they unwind, fill the gap."""
    if not isinstance(state.phase, Running | Pausing):
        return []
    return abort(state, now, f"no report of step {state.committed_step + 1} has come")


def _progress(state: CoreState, now: float) -> None:
    if isinstance(state.phase, Running | Pausing):
        state.phase.last_progress = now
