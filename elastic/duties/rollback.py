"""Rewinding: the run goes back to a step before something went wrong, though all of it lives.

The living stand at the wrong step and hold nothing any more, and what was saved since is void: then
the rule of recovery takes the newest of what is left. Batches that led to the trouble are left out
for good: which those are is part of the state, so that the samples of a step stay a pure function
of it (invariant 5).
"""

from __future__ import annotations

from elastic.duties.uploads import break_uploads
from elastic.geometry.sample_order import batch_number
from elastic.protocol.controller_state import CoreState, Rollback, VoidedCheckpoints
from elastic.protocol.events import Saved
from elastic.reshard.snapshot_placement import Placement


def order_rollback(state: CoreState, limit: int, cause: str, through: int = 0) -> bool:
    """Go back to `limit` or before at the next boundary, unless that has been done too often
    without getting on."""
    if state.committed_step > state.rolled_back_from + state.policy.spike_window:
        state.num_rollbacks = 0
    state.num_rollbacks += 1
    if state.num_rollbacks > state.policy.max_rollbacks:
        return False
    state.rolled_back_from = max(state.rolled_back_from, state.committed_step)
    state.rollback = Rollback(limit, cause, through)
    distrust(state, limit)
    return True


def shortfall(state: CoreState, limit: int) -> str:
    """Why the run cannot go back to this step or before, if so: all of a long run is not given up,
    and what keepers have is not known until they are asked."""
    few = max(state.policy.spike_window, state.policy.audit_every)
    if saved_up_to(state, limit) or state.committed_step <= few:
        return ""
    return f"there is no checkpoint of step {limit} or before to go back to: set checkpoint_every"


def distrust(state: CoreState, limit: int) -> None:
    """What is saved or kept of steps beyond `limit`, or is being so, is void from now on."""
    for snapshot_set in state.snapshot_sets:
        snapshot_set.newest_step = (
            limit if snapshot_set.newest_step is None else min(limit, snapshot_set.newest_step)
        )
    state.snapshot_placement = Placement()
    implied = (void for void in state.voided if void.step < limit)  # by the new one
    state.voided = (*implied, VoidedCheckpoints(limit, state.generation + 1))
    state.stale_checkpoints += [
        (one.step, one.generation) for one in state.saved if one.step > limit
    ]
    state.saved = saved_up_to(state, limit)
    break_uploads(state, lambda upload: upload.step > limit)


def saved_up_to(state: CoreState, limit: int) -> list[Saved]:
    """The known checkpoints of these steps, the newest last."""
    return [one for one in state.saved if one.step <= limit]


def let_go_of_the_living(state: CoreState) -> None:
    """Nobody trains any more: what they hold is what is to be undone. A run that ends instead
    keeps it."""
    if state.rollback and state.ending and state.held:
        state.rollback = None
    elif state.rollback:
        state.held, state.also_held = None, []


def skipped_batches_after(state: CoreState, step: int) -> tuple[int, ...]:
    """Which batches are left out once the rewind has come to a step."""
    if state.rollback is None:
        return state.skipped_batches
    steps = range(step + 1, state.rollback.through + 1)
    return tuple(
        sorted({*state.skipped_batches, *(batch_number(s, state.skipped_batches) for s in steps)})
    )
