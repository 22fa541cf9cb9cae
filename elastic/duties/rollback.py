"""Rollback: return to a step before something went wrong, although all workers live.

Live workers hold the wrong step and count as holders no more, and later checkpoints are void: the
recovery rule takes the newest holdings that remain. The batches that led to the problem are skipped
for good. They are part of the state, so that the samples of a step stay a pure function of it
(invariant 5).
"""

from __future__ import annotations

from elastic.duties.uploads import break_uploads
from elastic.geometry.sample_order import batch_number
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import Rollback, VoidedCheckpoints
from elastic.protocol.events import Saved
from elastic.reshard.snapshot_placement import Placement

MAX_ROLLBACKS = 3
"""Value of the policy field `max_rollbacks`."""


def order_rollback(
    state: ControllerState,
    limit: int,
    cause: str,
    through: int = 0,
    is_state_in_doubt: bool = False,
) -> bool:
    """Roll back to `limit` or before at the next step boundary; return False if rollbacks happened
    too often without progress."""
    if state.committed_step > state.rollbacks.from_step + state.policy.spike_window:
        state.rollbacks.number = 0
    state.rollbacks.number += 1
    if state.rollbacks.number > state.policy.max_rollbacks:
        return False
    state.rollbacks.from_step = max(state.rollbacks.from_step, state.committed_step)
    state.rollbacks.request = Rollback(limit, cause, through, is_state_in_doubt)
    void_after(state, limit)
    return True


def rollback_obstacle(state: ControllerState, limit: int) -> str:
    """Why the run cannot roll back to this step or before; empty if it can.

    A long run does not lose all of its work, and what snapshot servers hold is unknown until they
    are queried.
    """
    num_short_steps = max(state.policy.spike_window, state.policy.audit_every)
    if saved_up_to(state, limit) or state.committed_step <= num_short_steps:
        return ""
    return f"there is no checkpoint of step {limit} or before to go back to: set checkpoint.every"


def void_after(state: ControllerState, limit: int) -> None:
    """Void everything saved or kept of steps beyond `limit`, also what is still being saved."""
    for snapshot_set in state.snapshots.sets:
        snapshot_set.newest_step = (
            limit if snapshot_set.newest_step is None else min(limit, snapshot_set.newest_step)
        )
    state.snapshots.placement = Placement()
    implied = (void for void in state.checkpoints.voided if void.step < limit)  # by the new one
    state.checkpoints.voided = (*implied, VoidedCheckpoints(limit, state.generation + 1))
    state.checkpoints.stale += [
        (saved.step, saved.generation) for saved in state.checkpoints.saved if saved.step > limit
    ]
    state.checkpoints.saved = saved_up_to(state, limit)
    break_uploads(state, lambda upload: upload.step > limit)


def saved_up_to(state: ControllerState, limit: int) -> list[Saved]:
    """The known checkpoints of steps up to `limit`, the newest last."""
    return [saved for saved in state.checkpoints.saved if saved.step <= limit]


def discard_live_state(state: ControllerState) -> None:
    """Drop the live holdings that a rollback undoes. A run that ends instead keeps them, unless
    they are in doubt: a checkpoint of them would be newer than the last sound one."""
    request = state.rollbacks.request
    if request and state.ending and state.live.held and not request.is_state_in_doubt:
        state.rollbacks.request = None
    elif request:
        state.live.held, state.live.also_held = None, []


def skipped_batches_after(state: ControllerState, step: int) -> tuple[int, ...]:
    """Which batches are skipped once the rollback has reached a step."""
    if state.rollbacks.request is None:
        return state.rollbacks.skipped_batches
    steps = range(step + 1, state.rollbacks.request.through + 1)
    return tuple(
        sorted(
            {
                *state.rollbacks.skipped_batches,
                *(
                    batch_number(s, state.rollbacks.skipped_batches, state.job.updates_per_batch)
                    for s in steps
                ),
            }
        )
    )
