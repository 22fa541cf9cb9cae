"""The assignment that the next generation gets, and how many workers join at once.

Replicas that join receive their state from the members. If a few members had to send it to very
many, the reshard would exceed its time limit. So a run grows in rounds: in each, a member sends the
state at most a few times, and those that receive it are senders in the next round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from elastic.controller.capacity.newcomers import admitted
from elastic.duties.bandwidth import corrected_job
from elastic.geometry.assignment import Assignment
from elastic.geometry.errors import Infeasible
from elastic.geometry.topology import Place
from elastic.planner.proposal import Proposal, propose
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.phases import Resharding

COPIES_SENT = 8.0
"""How many times a member may send the state in one reshard, before its speed is known."""
TIME_SHARE = 0.5
"""A reshard is planned to need at most this share of its time limit."""
LEAST_MEASURED_S = 0.1
"""A shorter transfer says little about bandwidth."""
LONGEST = 10.0
"""A reshard may take at most this many times its time limit, however slow members were."""


def can_train(state: ControllerState) -> bool:
    """Whether a layout fits the workers that stay."""
    previous = state.live.held.assignment if state.live.held else None
    return not isinstance(next_assignment(state, previous), Infeasible)


def next_assignment(state: ControllerState, previous: Assignment | None) -> Proposal | Infeasible:
    """The assignment that the workers that stay would get in the next generation: all of them, or
    as many as one round can take."""
    staying = state.membership.staying()
    proposal = _whole(state, previous, staying)
    if isinstance(proposal, Infeasible) or previous is None:
        return proposal
    most = _copies_allowed(state)
    if copies_sent(previous, proposal.assignment, staying) <= most:
        return _with_shares(state, previous, proposal)
    return _first_round(state, previous, staying, proposal, most) or proposal


def whole_assignment(state: ControllerState, previous: Assignment | None) -> Proposal | Infeasible:
    """The assignment of all workers that stay, in however many rounds they join, without those
    that are deferred for now."""
    return _whole(state, previous, state.membership.staying())


def _whole(
    state: ControllerState, previous: Assignment | None, staying: Mapping[str, Place]
) -> Proposal | Infeasible:
    if previous is not None and len(some := admitted(state, previous, staying)) < len(staying):
        proposal = _propose(state, previous, staying, some)
        if not isinstance(proposal, Infeasible):
            assignment = proposal.assignment
            if len(assignment.members) >= state.policy.min_workers:
                standbys = tuple(sorted(staying.keys() - set(assignment.members)))
                return replace(proposal, assignment=replace(assignment, standbys=standbys))
    return _propose(state, previous, staying, staying)


def copies_sent(previous: Assignment, new: Assignment, staying: Iterable[str]) -> float:
    """How many times a member sends the whole state in the reshard, on average; 0 if none of them
    stays, because then the state comes from snapshots or storage."""
    num_receivers = len(set(new.members).difference(previous.members))
    if not num_receivers:
        return 0.0
    num_senders = len(set(previous.members).intersection(staying))
    return num_receivers / (_num_shards(new) * num_senders) if num_senders else 0.0


def reshard_timeout_s(
    state: ControllerState, previous: Assignment | None, new: Assignment
) -> float:
    """How long the reshard may take: longer than the policy says, at most `LONGEST` times, if the
    measured speed of the members requires it, e.g. for a minimum that one round cannot reach."""
    limit_s = state.policy.reshard_timeout_s
    rate = _copies_per_s(state)
    if previous is None or rate == inf:
        return limit_s
    copies = copies_sent(previous, new, state.membership.staying())
    return min(max(limit_s, copies / rate / TIME_SHARE), LONGEST * limit_s)


def note_reshard(state: ControllerState, phase: Resharding, is_late: bool) -> None:
    """Note how fast members sent their state, or that a reshard exceeded its time limit: the next
    one asks each member for half as much.

    A few workers that join are limited by what they receive, which says nothing about senders: so
    only a reshard counts in which each holder sent its part at least once.
    """
    if is_late:
        state.forming.num_late_reshards += 1
        return
    num_holders = len(phase.attempt.plan.holders)
    if not num_holders:
        return
    state.forming.num_late_reshards = 0
    seconds = max(event.seconds for event in phase.ready.values())
    moved = sum(event.bytes_moved for event in phase.ready.values())
    parts = num_holders * state.job.state_bytes / _num_shards(phase.attempt.assignment)
    if 0 < parts <= moved and seconds >= LEAST_MEASURED_S:
        state.forming.sent_bytes_per_s = moved / num_holders / seconds


def _first_round(
    state: ControllerState,
    previous: Assignment,
    staying: Mapping[str, Place],
    whole: Proposal,
    most: float,
) -> Proposal | None:
    """The assignment of the first round; None if it would have no more members than before."""
    former = set(previous.members)
    members = [worker for worker in staying if worker in former]
    joining = sorted(
        (worker for worker in admitted(state, previous, staying) if worker not in former),
        key=lambda worker: (staying[worker], worker),  # whole nodes, for groups of `tp`
    )
    num_joining = int(most * len(members) * _num_shards(whole.assignment))
    proposal = _propose(state, previous, staying, (*members, *joining[:num_joining]))
    if isinstance(proposal, Infeasible):
        return None
    first = proposal.assignment
    if len(first.members) <= len(members) or len(first.members) < state.policy.min_workers:
        return None
    standbys = tuple(sorted(staying.keys() - set(first.members)))
    reason = (
        f"{proposal.reason}; {len(standbys)} workers join in later rounds, so that no member sends "
        f"the state more than {most:.3g} times"
    )
    return replace(proposal, assignment=replace(first, standbys=standbys), reason=reason)


def _with_shares(state: ControllerState, previous: Assignment, proposal: Proposal) -> Proposal:
    """The proposal with the shares that are planned for the members, or that they have. Among other
    members, and under another layout, microbatches are dealt evenly."""
    new, dealing = proposal.assignment, state.stragglers.dealing
    if (new.layout, new.members) != (previous.layout, previous.members):
        return proposal
    is_planned = dealing.generation == previous.generation
    shares = dealing.shares if is_planned else previous.shares
    if not shares:
        return proposal
    reason = f"{proposal.reason}; microbatches are dealt by speed"
    return replace(proposal, assignment=replace(new, shares=shares), reason=reason)


def _copies_allowed(state: ControllerState) -> float:
    rate = _copies_per_s(state)
    most = COPIES_SENT if rate == inf else rate * state.policy.reshard_timeout_s * TIME_SHARE
    return max(1.0, most * 0.5**state.forming.num_late_reshards)


def _copies_per_s(state: ControllerState) -> float:
    """How many times a second a member could send the whole state; infinite if not measured."""
    if not state.forming.sent_bytes_per_s or not state.job.state_bytes:
        return inf
    return state.forming.sent_bytes_per_s / state.job.state_bytes


def _num_shards(assignment: Assignment) -> int:
    """Into how many parts the state is cut."""
    layout = assignment.layout
    return layout.num_workers // (layout.dp * layout.cp)


def _propose(
    state: ControllerState,
    previous: Assignment | None,
    staying: Mapping[str, Place],
    workers: Iterable[str],
) -> Proposal | Infeasible:
    """The assignment of some of the workers that stay."""
    return propose(
        previous,
        tuple(workers),
        generation=state.generation + 1,
        target_layout=state.layouts.target,
        topology=staying,
        job=corrected_job(state),
        memory_bytes=state.membership.least_memory_bytes(),
        snapshots_cover=False,
    )
