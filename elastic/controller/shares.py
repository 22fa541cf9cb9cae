"""Shares: how many microbatches each data rank computes while a straggler stays a member.

A straggler that no standby worker can replace computes fewer microbatches and the others more, so
that all are done at about the same time. Shares are part of the assignment: they change with a
planned pause, in which no state moves. Losses do not depend on them (invariant 5). Once no worker
is a straggler any more, or among other members, microbatches are dealt evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.controller.capacity.growth import is_worth_a_pause
from elastic.geometry.assignment import Assignment
from elastic.geometry.sample_order import balanced_shares, even_shares
from elastic.protocol.commands import Command
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.notes import Warned

LEAST_GAIN = 0.05
"""Shares do not follow a straggler's speed for less, because its ratio to the others varies, and
are given up if they make steps less shorter than that."""
LONG_CALM = 4
"""Shares that stay for this many times the required reports are no alternation."""
MAX_DOUBLINGS = 16
NUM_NAMED = 4


def least_ratio(factor: float) -> float:
    """The ratio from which a worker stays a straggler under unequal shares. It is below the factor,
    so that a worker close to that does not alternate."""
    return (1 + factor) / 2


def comparable_ratios(
    state: ControllerState, assignment: Assignment, ratios: dict[str, float], is_first: bool
) -> dict[str, float]:
    """The ratios that the slow members would have under even shares.

    Part of the compute time does not depend on the share, so the time for a microbatch is longer
    with a smaller one. The first report of a generation shows by how much.
    """
    dealing = state.stragglers.dealing
    if is_first:
        dealing.num_better = dealing.num_reports = 0  # earlier reports were about other work
        dealing.excess = {}
        for worker in ratios.keys() & dealing.planned.keys() if assignment.shares else ():
            dealing.excess[worker] = max(1.0, ratios[worker] / dealing.planned[worker])
    if not assignment.shares:
        return ratios
    even = {worker: ratio / dealing.excess.get(worker, 1.0) for worker, ratio in ratios.items()}
    least = least_ratio(state.policy.straggler_factor)
    return {worker: ratio for worker, ratio in even.items() if ratio > least}


def plan_shares(
    state: ControllerState, now: float, step: int, ratios: Mapping[str, float]
) -> list[Command]:
    """Plan other shares for the members if enough reports in a row show that steps become shorter.

    `ratios` has the members that compute more slowly than the others, and how many times as long
    they take for a microbatch. After each change twice as many reports are required, unless the
    shares before stayed for long. Shares that have not made steps shorter are given up.
    """
    assert state.live.held is not None
    assignment, dealing, policy = state.live.held.assignment, state.stragglers.dealing, state.policy
    if not policy.straggler_reduce or assignment.layout.pp > 1 or state.ending:
        return []
    num_required = policy.straggler_reports * 2 ** min(dealing.num_changes, MAX_DOUBLINGS)
    dealing.num_reports += dealing.num_changes > 0
    if dealing.num_reports > LONG_CALM * num_required:
        dealing.num_changes = 0
    if ratios and dealing.num_reports == policy.straggler_reports and _are_useless(state):
        return _change(state, step, (), "shares by speed have not made steps shorter: ")
    if not ratios and not assignment.shares:
        dealing.num_better = 0
        return []
    _, gain = _better_shares(state, assignment, ratios)
    pays = gain > 0 and is_worth_a_pause(state, now, gain)
    dealing.num_better = dealing.num_better + 1 if pays else 0
    if dealing.num_better < num_required:
        return []
    lasting = {
        worker: ratio
        for worker, ratio in ratios.items()
        if state.stragglers.num_slow[worker] >= policy.straggler_reports
    }
    shares, gain = _better_shares(state, assignment, lasting)
    if gain <= 0:
        return []
    return _change(state, step, shares, _reason(state, assignment, shares, lasting, gain), lasting)


def _are_useless(state: ControllerState) -> bool:
    """Whether steps are about as long as before with the same members and even shares."""
    assert state.live.held is not None
    step_s, dealing = state.steps.measured.median_s(), state.stragglers.dealing
    is_measured = bool(state.live.held.assignment.shares and step_s and dealing.step_s)
    return is_measured and step_s > (1 - LEAST_GAIN) * dealing.step_s


def _change(
    state: ControllerState,
    step: int,
    shares: tuple[int, ...],
    reason: str,
    ratios: Mapping[str, float] | None = None,
) -> list[Command]:
    dealing = state.stragglers.dealing
    dealing.generation, dealing.shares = state.generation, shares
    dealing.planned, dealing.step_s = dict(ratios or {}), _step_s_before(state)
    dealing.num_better, dealing.num_reports = 0, 0
    dealing.num_changes += 1
    text = reason if shares else f"{reason}microbatches are dealt evenly again"
    return [Warned(state.generation, step, "straggler", text)]


def sizes_of(assignment: Assignment, num_microbatches: int) -> tuple[int, ...]:
    """The number of microbatches of each data rank."""
    return assignment.shares or even_shares(num_microbatches, assignment.layout.num_data_ranks)


def _step_s_before(state: ControllerState) -> float:
    """The median time of a step now; shares that replace others need not gain against these."""
    assert state.live.held is not None
    return 0.0 if state.live.held.assignment.shares else state.steps.measured.median_s()


def _better_shares(
    state: ControllerState, assignment: Assignment, ratios: Mapping[str, float]
) -> tuple[tuple[int, ...], float]:
    """The best shares (empty: even ones), and the share of a step's compute that they save; 0 if it
    is too little."""
    num_microbatches, layout = state.job.num_microbatches, assignment.layout
    costs = [1.0] * layout.num_data_ranks
    for worker, ratio in ratios.items():
        data_rank = layout.data_rank(assignment.world_rank(worker))
        costs[data_rank] = max(costs[data_rank], ratio)
    best = balanced_shares(costs, num_microbatches)
    present = sizes_of(assignment, num_microbatches)
    gain = 1 - _longest(best, costs) / _longest(present, costs)
    is_even = best == even_shares(num_microbatches, layout.num_data_ranks)
    least = 0.0 if is_even else LEAST_GAIN
    return () if is_even else best, gain if gain > least else 0.0


def _longest(shares: Sequence[int], costs: Sequence[float]) -> float:
    """When the last rank is done, in times that a fast rank needs for a microbatch."""
    return max(share * cost for share, cost in zip(shares, costs, strict=True))


def _reason(
    state: ControllerState,
    assignment: Assignment,
    shares: tuple[int, ...],
    ratios: Mapping[str, float],
    gain: float,
) -> str:
    """For people: who computes how much from the next step boundary on, and why."""
    if not shares:
        return "no worker is a straggler any more: "
    layout, number = assignment.layout, state.job.num_microbatches
    reduced = [
        f"{worker} computes {shares[layout.data_rank(assignment.world_rank(worker))]}"
        for worker in list(ratios)[:NUM_NAMED]
    ]
    more = f" ({len(ratios) - NUM_NAMED} more are reduced)" if len(ratios) > NUM_NAMED else ""
    return (
        f"from the next step boundary on, {', '.join(reduced)}{more} of {number} microbatches, "
        f"others up to {max(shares)}: steps become up to {gain:.0%} shorter"
    )
