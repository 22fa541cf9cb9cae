"""Hang timeouts: how long the controller waits for silent or hanging workers, and which it stops.

While survivors unwind, a worker is stopped before `collective_timeout_s` only if it has not
answered probes, if a hang caused the abort, or if only newcomers are left, which hold no state. One
worker hangs: so at most one is stopped at a time, and then the others get time to unwind without
it.
"""

from __future__ import annotations

from math import inf

from elastic.duties.checkpoints import is_saved
from elastic.duties.recovery import find_live_state
from elastic.duties.snapshots import has_snapshots
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.phases import Aborting, Running


def hang_patience_s(state: ControllerState) -> float:
    """How long without progress is a hang. Before the first step, a long compilation is allowed
    for, and before that of a later generation one as long as the longest; a run that is to end and
    has nothing to save does not wait for it."""
    policy = state.policy
    is_worth_waiting = not (state.ending and is_saved(state))
    if not state.steps.measured.recent_s and is_worth_waiting:
        return policy.first_step_timeout_s
    first_s = 0.0
    if isinstance(state.phase, Running) and not state.phase.num_commits:
        first_s = min(policy.first_step_timeout_s, policy.hang_factor * state.steps.first_s)
    return max(policy.hang_timeout_s, policy.hang_factor * state.steps.measured.median_s(), first_s)


def next_stop_time(state: ControllerState, phase: Aborting) -> float:
    """When the controller next considers pending workers for stopping."""
    return min(_pending_end(state, phase), _suspects_end(state, phase))


def choose_workers_to_stop(
    state: ControllerState, phase: Aborting, now: float
) -> tuple[set[str], float]:
    """The pending workers to stop now; if there are none, when to check again."""
    end_of_all = _pending_end(state, phase)
    if now >= end_of_all:
        return set(phase.pending), now
    end = _suspects_end(state, phase)
    if now < end:
        return set(), min(end, end_of_all)
    suspects = phase.pending & phase.suspects or {_longest_stalled(state, phase)}
    is_needed = (
        find_live_state(state) is not None and find_live_state(state, without=suspects) is None
    )
    if is_needed and not has_snapshots(state):
        end = max(end, _needed_end(state, phase))
    return (suspects, now) if now >= end else (set(), min(end, end_of_all))


def _pending_end(state: ControllerState, phase: Aborting) -> float:
    """When all workers that are still pending are stopped: sooner if the run shall end."""
    if not state.ending or phase.rolling_forward is not None:
        return phase.patience
    return min(phase.patience, phase.began + hang_patience_s(state))


def _suspects_end(state: ControllerState, phase: Aborting) -> float:
    """When workers that do not answer probes are stopped; after a hang, when the worker that most
    likely hangs is stopped."""
    if phase.pending & phase.suspects:
        return phase.suspected_at + _allowance_s(state, phase)
    if phase.rolling_forward is not None:
        return inf
    if not phase.is_hang and (not phase.pending <= phase.newcomers or not find_live_state(state)):
        return inf
    return phase.changed_at + _hang_allowance_s(state, phase)


def _needed_end(state: ControllerState, phase: Aborting) -> float:
    """When a worker is stopped although it alone holds a part of the state: early only if a
    snapshot or checkpoint can replace it, or the run shall end."""
    has_source = bool(state.checkpoints.saved) or is_saved(state) or has_snapshots(state)
    if not (state.ending or has_source) or phase.rolling_forward is not None:
        return phase.patience
    if phase.pending & phase.suspects:
        return phase.began + hang_patience_s(state)
    return phase.began


def _hang_allowance_s(state: ControllerState, phase: Aborting) -> float:
    """After a hang, how long no worker may unwind before the controller stops one.

    It is short if only one worker is left that can be the hanging one, and for the first one if the
    run shall end. If several are left, or if the hanging one may already be gone, the others may be
    healthy and only slow.
    """
    policy, allowance_s = state.policy, _allowance_s(state, phase)
    is_known = len(phase.pending) == 1 and not phase.has_lost_pending
    if is_known and (state.ending or not phase.reports):
        return allowance_s
    if is_known or (state.ending and not phase.has_lost_pending):
        return max(allowance_s, policy.hang_share * policy.hang_timeout_s)
    return max(allowance_s, hang_patience_s(state))


def _allowance_s(state: ControllerState, phase: Aborting) -> float:
    """How long a suspected worker may take to unwind: it follows what was measured in this run,
    with a floor for the survivors' devices."""
    policy = state.policy
    floor_s = policy.quiesce_deadline_cuda_s if phase.on_gpu else policy.quiesce_deadline_s
    measured_s = max(state.steps.measured.median_s(), phase.last_unwound_s)
    return max(floor_s, policy.quiesce_factor * measured_s)


def _longest_stalled(state: ControllerState, phase: Aborting) -> str:
    """The pending worker whose training thread has stalled for the longest, as far as that is
    known.

    Otherwise it is the first by name, so that a replay chooses the same.
    """
    order = {worker: i for i, worker in enumerate(state.steps.stalled)}
    return min(phase.pending, key=lambda worker: (order.get(worker, len(order)), worker))
