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

from elastic.controller.forming import next_assignment
from elastic.duties.bandwidth import capacity_now, known_job
from elastic.geometry.errors import Infeasible
from elastic.planner.step_cost import cost_of
from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.controller_state import CoreState

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
    if state.standby_since is None:
        return inf
    if len(state.worker_records) == len(state.warm):
        return state.no_growth_before
    return max(state.no_growth_before, state.standby_since + state.policy.growth_settle_s)


def shall_grow(state: CoreState, now: float) -> bool:
    """Decide, once it is time: now, later (then it is asked again), or not with these."""
    if state.standby_since is None or now < growth_deadline(state):
        return False
    needed_s = _needed_calm_s(state)
    lasting_s, calm_since = _expected_calm(state, now)
    if needed_s > state.policy.growth_horizon_s:
        state.standby_since = None  # the next joiner asks again
        return False
    if needed_s > lasting_s:
        state.no_growth_before = calm_since + needed_s
        return False
    state.standby_since, state.no_growth_before = None, 0.0
    return True


def idle_deadline(state: CoreState) -> float:
    """When to look whether there are spares to be given back."""
    return inf if state.idle_since is None else state.idle_since + state.policy.standby_timeout_s


def give_back(state: CoreState, now: float) -> list[Command]:
    """End spares with which nothing has been gained for long; nobody is started in their place
    until members are lost, or another layout is wished for."""
    if now < idle_deadline(state):
        return []
    standbys = sorted(state.warm - state.draining - set(state.members()))
    state.idle_since = now if standbys else None
    if not standbys or state.standby_since is not None or _needed_calm_s(state) < inf:
        return []
    state.idle_since = None
    state.num_given_back += len(standbys)
    state.draining.update(standbys)
    cause = f"it has been spare for {state.policy.standby_timeout_s:g} s"
    return [StopWorker(worker, cause) for worker in standbys]


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
    if state.target_layout.is_met(wider.layout) and not state.target_layout.is_met(present.layout):
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
