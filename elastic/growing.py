"""Growth: whether it pays to pause for workers that have come, and which of them are of no use.

A growth costs a pause, measured at those before, and saves `1 - new / old` of each step's time for
as long as the members stay together. That is taken to be as long as they lately did, or already
have, but not more than the horizon. So capacity that comes and goes is not run after, and is used
once it stays.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from statistics import mean, median

from elastic.commands import Command, StopWorker
from elastic.costs import cost_of
from elastic.forming import next_assignment
from elastic.infeasible import Infeasible
from elastic.links import capacity_now, known_job
from elastic.state import CoreState

NUM_RECENT_PAUSES = 5
"""Of so many the median counts."""


def note_pause(state: CoreState, now: float, step_s: float) -> None:
    """The first step after a planned pause tells how long that was, in all."""
    if state.paused_at is not None:
        pause_s = max(0.0, now - state.paused_at - step_s)
        state.pauses_s = [*state.pauses_s[1 - NUM_RECENT_PAUSES :], pause_s]
        state.paused_at = None


def growth_deadline(state: CoreState) -> float:
    """When to decide about spares: others may join them, and calm may have to last longer."""
    if state.spare_since is None:
        return inf
    if len(state.seats) == len(state.warm):
        return state.no_growth_before
    return max(state.no_growth_before, state.spare_since + state.policy.growth_settle_s)


def shall_grow(state: CoreState, now: float) -> bool:
    """Decide, once it is time: now, later (then it is asked again), or not with these."""
    if state.spare_since is None or now < growth_deadline(state):
        return False
    needed_s = _needed_calm_s(state)
    lasting_s, calm_since = _expected_calm(state, now)
    if needed_s > state.policy.growth_horizon_s:
        state.spare_since = None  # the next joiner asks again
        return False
    decide_at = calm_since + needed_s
    if needed_s > lasting_s and now < decide_at:  # by rounding it may be now
        state.no_growth_before = decide_at
        return False
    state.spare_since, state.no_growth_before = None, 0.0
    return True


def idle_deadline(state: CoreState) -> float:
    """When to look whether there are spares to be given back."""
    return inf if state.idle_since is None else state.idle_since + state.policy.spare_timeout_s


def give_back(state: CoreState, now: float) -> list[Command]:
    """End spares with which nothing has been gained for long; nobody is started in their place
    until members are lost, or another layout is wished for."""
    if now < idle_deadline(state):
        return []
    spares = sorted(state.warm - state.leaving - set(state.members()))
    state.idle_since = now if spares else None
    if not spares or state.spare_since is not None or _needed_calm_s(state) < inf:
        return []
    state.idle_since = None
    state.num_given_back += len(spares)
    state.leaving.update(spares)
    cause = f"it has been spare for {state.policy.spare_timeout_s:g} s"
    return [StopWorker(worker, cause) for worker in spares]


def _needed_calm_s(state: CoreState) -> float:
    """For how long the members must stay together for a growth to be worth its pause; infinite
    if there is none to be had."""
    assert state.held is not None
    present = state.held.assignment
    proposal = next_assignment(state, present)
    if isinstance(proposal, Infeasible):
        return inf
    wider = proposal.assignment
    pause_s = median(state.pauses_s) if state.pauses_s else 0.0
    if state.wish.is_met(wider.layout) and not state.wish.is_met(present.layout):
        return pause_s
    if len(wider.members) <= len(present.members):
        return inf
    job, capacity = known_job(state), capacity_now(state)
    gain = 1 - cost_of(wider.layout, job, capacity) / cost_of(present.layout, job, capacity)
    if gain > 0:
        return pause_s / gain
    return pause_s if wider.layout.dp > present.layout.dp else inf


def _expected_calm(state: CoreState, now: float) -> tuple[float, float]:
    """How long the members are expected to stay together, in seconds, and since when they do."""
    if len(state.changes_at) < 2:
        return inf, now
    between = mean(later - earlier for earlier, later in pairwise(state.changes_at))
    calm_since = state.changes_at[-1]
    return max(between, now - calm_since), calm_since
