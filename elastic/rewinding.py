"""Rewinding: the run goes back to a step before something went wrong, though all of it lives.

The living stand at the wrong step and hold nothing any more, and what was saved since is void: then
the rule of recovery takes the newest of what is left. Batches that led to the trouble are left out
for good: which those are is part of the state, so that the samples of a step stay a pure function
of it (invariant 5).
"""

from __future__ import annotations

from elastic.events import Saved
from elastic.keeping import Placement
from elastic.samples import batch_number
from elastic.state import CoreState, Rewind, Void
from elastic.uploads import break_uploads


def rewind(state: CoreState, limit: int, cause: str, through: int = 0) -> bool:
    """Go back to `limit` or before at the next boundary, unless that has been done too often
    without getting on."""
    if state.committed_step > state.rewound_from + state.policy.spike_window:
        state.num_rewinds = 0
    state.num_rewinds += 1
    if state.num_rewinds > state.policy.max_rewinds:
        return False
    state.rewound_from = max(state.rewound_from, state.committed_step)
    state.rewind = Rewind(limit, cause, through)
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
    for shelf in state.shelves:
        shelf.newest_step = limit if shelf.newest_step is None else min(limit, shelf.newest_step)
    state.protected = Placement()
    implied = (void for void in state.voids if void.step < limit)  # by the new one
    state.voids = (*implied, Void(limit, state.generation + 1))
    state.litter += [(one.step, one.generation) for one in state.saved if one.step > limit]
    state.saved = saved_up_to(state, limit)
    break_uploads(state, lambda upload: upload.step > limit)


def saved_up_to(state: CoreState, limit: int) -> list[Saved]:
    """The known checkpoints of these steps, the newest last."""
    return [one for one in state.saved if one.step <= limit]


def let_go_of_the_living(state: CoreState) -> None:
    """Nobody trains any more: what they hold is what is to be undone. A run that ends instead
    keeps it."""
    if state.rewind and state.ending and state.held:
        state.rewind = None
    elif state.rewind:
        state.held, state.also_held = None, []


def left_out_after(state: CoreState, step: int) -> tuple[int, ...]:
    """Which batches are left out once the rewind has come to a step."""
    if state.rewind is None:
        return state.left_out
    steps = range(step + 1, state.rewind.through + 1)
    return tuple(sorted({*state.left_out, *(batch_number(s, state.left_out) for s in steps)}))
