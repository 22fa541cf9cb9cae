"""Forming a generation: choose the state, assign the ranks, form, move, resume."""

from __future__ import annotations

from elastic.assigning import assign
from elastic.assignment import Assignment
from elastic.commands import (
    Command,
    Form,
    Relaid,
    Relayout,
    Resume,
    RolledBack,
    StopWorker,
    Waited,
    WorkerBytes,
)
from elastic.events import GroupFormed, StateReady
from elastic.infeasible import Infeasible
from elastic.phases import Attempt, Ending, Forming, Relaying, Running, Waiting
from elastic.recovery import Source, choose_source
from elastic.state import CoreState, Held
from elastic.transfers import Relayout as RelayoutPlan


def try_form(state: CoreState, now: float) -> list[Command]:
    """Form the next generation if enough workers are there; else wait, with the reason."""
    reason = _not_yet(state, now)
    if reason:
        return wait(state, now, reason)
    source = choose_source(state)
    assignment = _assign(state, source)
    if isinstance(assignment, Infeasible):
        if state.num_staying() >= state.policy.max_workers:
            state.ending = Ending("user_error", assignment.reason)
        return wait(state, now, assignment.reason)
    state.generation = assignment.generation
    commands: list[Command] = []
    if source.step < state.committed_step:
        commands.append(
            RolledBack(state.generation, source.step, state.committed_step, source.kind)
        )
        _fall_back(state, source.step)
    plan = RelayoutPlan(
        state.history, source.step, source.old, assignment, tuple(sorted(source.holders))
    )
    attempt = Attempt(assignment, plan, source.kind, source.path, now)
    participants = set(plan.participants)
    state.ever_formed = True
    state.enter(Forming(attempt, participants, now + state.policy.form_timeout_s))
    form = Form(state.generation, assignment, plan, state.store_host, state.store_port)
    return [*commands, form]


def wait(state: CoreState, now: float, reason: str) -> list[Command]:
    """Stay in, or go to, Waiting; a new reason is told once."""
    if isinstance(state.phase, Waiting):
        if state.phase.reason == reason:
            return []
        state.phase.reason = reason
    else:
        state.enter(Waiting(reason, now))
    return [Waited(reason)]


def on_group_formed(state: CoreState, now: float, event: GroupFormed) -> list[Command]:
    phase = state.phase
    if not isinstance(phase, Forming) or event.generation != state.generation:
        return []
    phase.pending.discard(event.worker)
    if phase.pending:
        return []
    attempt = phase.attempt
    participants = attempt.plan.participants
    deadline = now + state.policy.relayout_timeout_s
    state.enter(Relaying(attempt, set(participants), deadline))
    return [Relayout(state.generation, participants, attempt.source, attempt.path)]


def on_state_ready(state: CoreState, now: float, event: StateReady) -> list[Command]:
    """Resume only after all groups are formed and all state is acknowledged (invariant 7)."""
    phase = state.phase
    if not isinstance(phase, Relaying) or event.generation != state.generation:
        return []
    phase.pending.discard(event.worker)
    phase.ready[event.worker] = event
    if phase.pending:
        return []
    return _resume(state, now, phase)


def _resume(state: CoreState, now: float, phase: Relaying) -> list[Command]:
    attempt = phase.attempt
    members = attempt.assignment.members
    state.held = Held(attempt.assignment, set(members))
    spares = state.warm - state.leaving - set(members)
    state.spare_since = now if spares else None
    state.enter(Running(now, now))
    relaid = Relaid(
        state.generation,
        state.committed_step,
        attempt.source,
        sum(event.bytes_moved for event in phase.ready.values()),
        sum(event.bytes_needed for event in phase.ready.values()),
        now - attempt.started,
    )
    held = [phase.ready[worker] for worker in members]
    resume = Resume(
        generation=state.generation,
        step=state.committed_step,
        layout=str(attempt.assignment.layout),
        workers=members,
        state=tuple(WorkerBytes(e.param_bytes, e.grad_bytes, e.optimizer_bytes) for e in held),
        evaluated_step=state.evaluated_step,
        released=attempt.plan.participants[len(members) :],
    )
    leavers = sorted(state.leaving - set(members))
    return [relaid, resume, *(StopWorker(worker, "it leaves by plan") for worker in leavers)]


def patience_deadline(state: CoreState, phase: Waiting) -> float:
    """When waiting for more than the minimum ends."""
    if state.num_staying() < state.policy.min_workers or not state.store_port:
        return float("inf")
    if not state.ever_formed:
        return phase.since + state.policy.start_timeout_s
    return (state.spare_since or phase.since) + state.policy.growth_settle_s


def _not_yet(state: CoreState, now: float) -> str:
    num_staying, policy = state.num_staying(), state.policy
    if not state.store_port:
        return "the store is starting"
    if num_staying < policy.min_workers:
        return f"{num_staying} of at least {policy.min_workers} workers are ready"
    if num_staying >= policy.max_workers or not _others_are_coming(state, now):
        return ""
    return f"{num_staying} of {policy.max_workers} workers are ready"


def _others_are_coming(state: CoreState, now: float) -> bool:
    """Whether waiting for more than the minimum is still worth it."""
    phase = state.phase
    if not isinstance(phase, Waiting):
        return False
    all_warm = state.ever_formed and len(state.seats) == len(state.warm)
    return not all_warm and now < patience_deadline(state, phase)


def _assign(state: CoreState, source: Source) -> Assignment | Infeasible:
    staying = {w: state.seats[w].place for w in sorted(state.warm - state.leaving)}
    memories = [m for w in staying if (m := state.seats[w].memory_bytes) is not None]
    return assign(
        source.old,
        tuple(staying),
        generation=state.generation + 1,
        wish=state.wish,
        topology=staying,
        job=state.job,
        memory_bytes=min(memories, default=None),
        snapshots_cover=False,
    )


def _fall_back(state: CoreState, step: int) -> None:
    """All later steps are void, uploads in flight included: their bits will differ."""
    state.history = state.generation
    state.committed_step = step
    state.evaluated_step = min(state.evaluated_step, step)
    state.last_vote = None
    state.uploads.clear()
