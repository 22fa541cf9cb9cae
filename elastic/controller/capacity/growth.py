"""Growth: whether a pause to add workers pays, and which standby workers to release.

A growth costs a pause, measured at earlier ones, and saves `1 - new / old` of each step's time for
as long as the members stay together. The controller expects that to be as long as they lately did,
or already have, up to the horizon. So the run ignores capacity that comes and goes, and uses it
once it stays.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from statistics import mean, median

from elastic.controller.capacity.next_assignment import whole_assignment
from elastic.duties.bandwidth import capacity_now, known_job
from elastic.geometry.errors import Infeasible
from elastic.planner.models.step_cost import cost_of
from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.controller_state import ControllerState

JOIN_WAIT_S = 2.0
"""Value of the policy field `growth_wait_s`."""
NUM_RECENT_PAUSES = 5
"""The expected pause is the median of this many."""


def note_pause(state: ControllerState, now: float, step_s: float) -> None:
    """The first step after a planned pause shows how long the pause was in all."""
    if state.growth.paused_at is not None:
        pause_s = max(0.0, now - state.growth.paused_at - step_s)
        state.growth.pauses_s = [*state.growth.pauses_s[1 - NUM_RECENT_PAUSES :], pause_s]
        state.growth.paused_at = None


def growth_deadline(state: ControllerState) -> float:
    """When to decide about standby workers: others may join them, and the calm may have to last
    longer."""
    if state.growth.standby_since is None or state.forming.num_attempts:
        return inf  # a run that recovers commits a step first
    if len(state.membership.records) == len(state.membership.warm):
        return state.growth.no_growth_before
    return max(
        state.growth.no_growth_before, state.growth.standby_since + state.policy.growth_wait_s
    )


def should_grow(state: ControllerState, now: float) -> bool:
    """Decide when it is time: grow now, decide again later, or do not grow with these workers."""
    if state.growth.standby_since is None or now < growth_deadline(state):
        return False
    needed_s = _needed_calm_s(state)
    lasting_s, calm_since = _expected_calm(state, now)
    if needed_s > state.policy.growth_horizon_s:
        state.growth.standby_since = None  # the next joiner asks again
        return False
    decide_at = calm_since + needed_s
    if needed_s > lasting_s and now < decide_at:  # rounding may yield the present time
        state.growth.no_growth_before = decide_at
        return False
    state.growth.standby_since, state.growth.no_growth_before = None, 0.0
    return True


def is_worth_a_pause(state: ControllerState, now: float, gain: float) -> bool:
    """Whether steps that are shorter by a share of `gain` make up for a pause, as long as the
    members are expected to stay together."""
    pauses_s = state.growth.pauses_s or [state.forming.reshard_s]
    lasting_s, _ = _expected_calm(state, now)
    return median(pauses_s) <= gain * min(lasting_s, state.policy.growth_horizon_s)


def idle_deadline(state: ControllerState) -> float:
    """When to look for standby workers to release."""
    return (
        inf
        if state.growth.idle_since is None
        else state.growth.idle_since + state.policy.standby_timeout_s
    )


def release_idle_standbys(state: ControllerState, now: float) -> list[Command]:
    """Stop standby workers that have been of no use for long. No others start in their place until
    members are lost, or another target layout is requested."""
    if now < idle_deadline(state):
        return []
    idle = state.membership.warm - state.membership.draining - state.market.extra
    standbys = sorted(idle.difference(state.live.members()))
    state.growth.idle_since = now if standbys else None
    if not standbys or state.growth.standby_since is not None or _needed_calm_s(state) < inf:
        return []
    state.growth.idle_since = None
    state.growth.num_given_back += len(standbys)
    state.membership.draining.update(standbys)
    cause = f"it was on standby for {state.policy.standby_timeout_s:g} s"
    return [StopWorker(worker, cause) for worker in standbys]


def _needed_calm_s(state: ControllerState) -> float:
    """How long the members must stay together for a growth to be worth its pause; infinite if no
    growth is possible."""
    assert state.live.held is not None
    current = state.live.held.assignment
    proposal = whole_assignment(state, current)
    if isinstance(proposal, Infeasible):
        return inf
    grown = proposal.assignment
    pause_s = median(state.growth.pauses_s) if state.growth.pauses_s else 0.0
    if state.layouts.target.is_met(grown.layout) and not state.layouts.target.is_met(
        current.layout
    ):
        return pause_s
    if len(grown.members) <= len(current.members):
        return inf
    job, capacity = known_job(state), capacity_now(state)
    gain = 1 - cost_of(grown.layout, job, capacity) / cost_of(current.layout, job, capacity)
    if gain > 0:
        return pause_s / gain
    return pause_s if grown.layout.dp > current.layout.dp else inf


def _expected_calm(state: ControllerState, now: float) -> tuple[float, float]:
    """How long the members are expected to stay together, in seconds, and since when they are
    together."""
    if len(state.membership.changes_at) < 2:
        return inf, now
    mean_interval_s = mean(
        later - earlier for earlier, later in pairwise(state.membership.changes_at)
    )
    calm_since = state.membership.changes_at[-1]
    return max(mean_interval_s, now - calm_since), calm_since
