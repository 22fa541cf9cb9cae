"""Workers that hang or do not answer: how long the controller waits for them, and which are ended.

While survivors unwind, a worker is ended before `collective_timeout_s` only if it has not answered
probes, or if the abort was caused by a hang. One worker hangs: so at most one is ended at a time,
and then the others get time to unwind without it.
"""

from __future__ import annotations

from math import inf

from elastic.duties.checkpoints import is_saved
from elastic.duties.recovery import living
from elastic.duties.snapshots import has_snapshots
from elastic.protocol.controller_state import CoreState
from elastic.protocol.phases import Aborting


def hang_patience_s(state: CoreState) -> float:
    """No progress for so long is a hang. Before the first step there may be a long compilation;
    a run that is to end and has nothing to save does not wait for that."""
    policy = state.policy
    is_worth_waiting = not (state.ending and is_saved(state))
    if not state.recent_step_s and is_worth_waiting:
        return policy.first_step_timeout_s
    return max(policy.hang_timeout_s, policy.hang_factor * state.median_step_s())


def next_end(state: CoreState, phase: Aborting) -> float:
    """When the controller next looks for pending workers to be ended."""
    return min(_end_of_all(state, phase), _end_of_accused(state, phase))


def due(state: CoreState, phase: Aborting, now: float) -> tuple[set[str], float]:
    """The pending workers that are to be ended now; if none are, when to look again."""
    end_of_all = _end_of_all(state, phase)
    if now >= end_of_all:
        return set(phase.pending), now
    end = _end_of_accused(state, phase)
    if now < end:
        return set(), min(end, end_of_all)
    accused = phase.pending & phase.suspects or {_stillest(state, phase)}
    is_needed = living(state) is not None and living(state, without=accused) is None
    if is_needed and not has_snapshots(state):
        end = max(end, _end_of_needed(state, phase))
    return (accused, now) if now >= end else (set(), min(end, end_of_all))


def _end_of_all(state: CoreState, phase: Aborting) -> float:
    """When all that are still pending are ended: sooner if the run shall end."""
    if not state.ending or phase.rolling_forward is not None:
        return phase.patience
    return min(phase.patience, phase.began + hang_patience_s(state))


def _end_of_accused(state: CoreState, phase: Aborting) -> float:
    """When workers that do not answer probes are ended, or else, after a hang, the one that is
    most likely to hang."""
    if phase.pending & phase.suspects:
        return phase.suspected_at + _allowance_s(state, phase)
    if not phase.is_hang or phase.rolling_forward is not None:
        return inf
    return phase.changed_at + _hang_allowance_s(state, phase)


def _end_of_needed(state: CoreState, phase: Aborting) -> float:
    """When a worker is ended though it alone holds a part of the state: early only if there is a
    snapshot or checkpoint to go on from, or the run shall end."""
    is_in_reach = bool(state.saved) or is_saved(state) or has_snapshots(state)
    if not (state.ending or is_in_reach) or phase.rolling_forward is not None:
        return phase.patience
    if phase.pending & phase.suspects:
        return phase.began + hang_patience_s(state)
    return phase.began


def _hang_allowance_s(state: CoreState, phase: Aborting) -> float:
    """How long no worker need unwind before one is ended.

    It is short where only one worker is left that can be the one that hangs, and for the first one
    if the run shall end. Where several are left, or where the one that hangs may be gone already,
    the others may be healthy and only slow.
    """
    policy, allowance_s = state.policy, _allowance_s(state, phase)
    is_known = len(phase.pending) == 1 and not phase.has_lost_pending
    if is_known and (state.ending or not phase.reports):
        return allowance_s
    if is_known or (state.ending and not phase.has_lost_pending):
        return max(allowance_s, policy.hang_share * policy.hang_timeout_s)
    return max(allowance_s, hang_patience_s(state))


def _allowance_s(state: CoreState, phase: Aborting) -> float:
    """How long a worker that is suspected may take to unwind: it follows what was measured in this
    run, with a floor for the survivors' devices."""
    policy = state.policy
    floor_s = policy.quiesce_deadline_cuda_s if phase.on_gpu else policy.quiesce_deadline_s
    measured_s = max(state.median_step_s(), phase.last_unwound_s)
    return max(floor_s, policy.quiesce_factor * measured_s)


def _stillest(state: CoreState, phase: Aborting) -> str:
    """The pending worker whose training thread has stood still for the longest, as far as that is
    known; without that the first by name, so that a replay chooses the same."""
    place = {worker: i for i, worker in enumerate(state.standing_still)}
    return min(phase.pending, key=lambda worker: (place.get(worker, len(place)), worker))
