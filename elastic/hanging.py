"""Workers that hang: how long the controller waits for one, also where it alone holds state."""

from __future__ import annotations

from elastic.phases import Aborting
from elastic.protecting import is_protected
from elastic.saving import is_saved
from elastic.state import CoreState


def hang_patience_s(state: CoreState) -> float:
    """No progress for so long is a hang. Before the first step there may be a long compilation;
    a run that is to end and has nothing to save does not wait for that."""
    policy = state.policy
    is_worth_waiting = not (state.ending and is_saved(state))
    if not state.recent_step_s and is_worth_waiting:
        return policy.first_step_timeout_s
    return max(policy.hang_timeout_s, policy.hang_factor * state.median_step_s())


def give_up_at(state: CoreState, phase: Aborting, allowance_s: float) -> float:
    """Until when workers are waited for that do not unwind, though they alone hold a part of the
    state; `allowance_s` is what a worker may need to unwind.

    That is `phase.patience`, unless there is a snapshot or checkpoint to go on from, or a stop is
    asked for. Then it is the hang timeout, which is over for the one worker whose hang was the
    cause of the abort.
    """
    is_in_reach = bool(state.saved) or is_saved(state) or is_protected(state)
    has_hung = phase.is_hang and (len(phase.pending) == 1 or bool(phase.reports))
    is_suspect = phase.is_hang or bool(phase.suspects)
    if not (state.ending or (is_in_reach and is_suspect)) or phase.settling is not None:
        return phase.patience
    patience_s = allowance_s if has_hung else hang_patience_s(state)
    return min(phase.patience, phase.began + patience_s)
