"""Forming a generation: choose the state, assign the ranks, form, move, resume."""

from __future__ import annotations

from dataclasses import replace

from elastic.assigning import Proposal, propose
from elastic.assignment import Assignment
from elastic.avoiding import let_go_of_spares
from elastic.blaming import guarded_step
from elastic.catch_up import mark_missing
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
from elastic.keeping import carry
from elastic.links import known_job, median_speeds
from elastic.phases import Aborting, Attempt, Ending, Forming, Relaying, Running, Waiting
from elastic.protecting import ask_keepers, begin_shelf, shelve
from elastic.recovery import Source, choose_source, living
from elastic.rewinding import left_out_after, let_go_of_the_living
from elastic.saving import begin_saving, drop_void, end, is_saved
from elastic.state import CoreState, Held
from elastic.transfers import Carried
from elastic.transfers import Relayout as RelayoutPlan
from elastic.uploads import break_uploads, open_upload
from elastic.wishing import withdraw

NUM_RECENT_FORMINGS = 4


def go_on(state: CoreState, now: float) -> list[Command]:
    """Form the next generation, or end; a state that only keepers have comes back first, so that
    it can be saved."""
    let_go_of_the_living(state)
    if state.ending and not _can_come_back(state):
        return end(state, now)
    return let_go_of_spares(state) + try_form(state, now)


def save_anew(state: CoreState, now: float) -> list[Command]:
    """A writer of the last checkpoint is gone, or does not hold what it was thought to. A complete
    run whose state is lost goes back."""
    if state.ending == Ending("completed") and not living(state):
        state.ending = None
    return go_on(state, now)


def try_form(state: CoreState, now: float) -> list[Command]:
    """Form the next generation if enough workers are there; else wait, with the reason."""
    asking = ask_keepers(state, now)
    if state.asked and not living(state):
        is_short = isinstance(state.phase, Aborting)
        return asking + wait(state, now, "the keepers are asked what they have", is_short=is_short)
    lacking = _lacking(state)
    if lacking:
        return wait(state, now, lacking)
    until = _patience_until(state)
    if until is not None and now < until:
        reason = f"{state.num_staying()} of {state.policy.max_workers} workers are ready"
        return wait(state, now, reason, until)
    source = choose_source(state)
    if state.ending and source.old is None:
        return end(state, now)
    proposal = next_assignment(state, source.old)
    if isinstance(proposal, Infeasible):
        return end(state, now) if state.ending else _refuse(state, now, proposal)
    assignment = proposal.assignment
    commands: list[Command] = []
    of_this_step = state.holdings() if source.old and source.step == state.committed_step else []
    if source.step > state.committed_step:  # by snapshots, of which nobody lives to tell
        commands += mark_missing(state, now, source.step)
    state.generation = assignment.generation
    state.former_wish = None
    state.unheard, state.standing_still = (0, 0), ()
    if source.step < state.committed_step:
        commands.append(_roll_back(state, source))
        commands += drop_void(state)
    plan = _plan(state, source, assignment)
    participants = set(plan.participants)
    _keep_held(state, source, participants, of_this_step)
    if source.old is None:
        break_uploads(state)  # of steps that will be redone, and their bits will differ
    shelve(state, source.step)
    attempt = Attempt(assignment, plan, source.kind, source.path, now)
    state.ever_formed = True
    state.enter(Forming(attempt, participants, now + _timeout_s(state, len(participants))))
    form = Form(
        state.generation,
        assignment,
        plan,
        state.store_host,
        state.store_port,
        tuple(state.keepers[n] for n in sorted({n for part in plan.carried for n in part.nodes})),
        proposal.reason,
        proposal.refusals,
    )
    return [*commands, form]


def _timeout_s(state: CoreState, num_participants: int) -> float:
    """How long forming may take: more workers take longer to connect, and a busy cluster does."""
    policy, measured_s = state.policy, max(state.recent_form_s, default=0.0)
    scaled_s = policy.form_timeout_per_worker_s * num_participants
    return max(policy.form_timeout_s, policy.form_factor * measured_s, scaled_s)


def note_time(state: CoreState, now: float, phase: Forming) -> None:
    """Forming has ended, or was late: then the next one gets a multiple of the time it has had."""
    took_s = now - phase.attempt.started
    state.recent_form_s = [*state.recent_form_s[1 - NUM_RECENT_FORMINGS :], took_s]


def _keep_held(
    state: CoreState, source: Source, participants: set[str], of_this_step: list[Held]
) -> None:
    """With `Form` its participants forget what they hold under any other assignment; a worker that
    is left out of it keeps that, until a step commits."""
    left = [Held(held.assignment, held.holders - participants) for held in of_this_step]
    state.held = Held(source.old, set(source.holders)) if source.old else None
    state.also_held = [held for held in left if held.holders and held.assignment != source.old]


def _plan(state: CoreState, source: Source, assignment: Assignment) -> RelayoutPlan:
    carried: tuple[Carried, ...] = ()
    if source.old and (source.snapshots or source.remade):
        staying = state.staying()
        carried = carry(source.old, source.snapshots, assignment, staying, source.remade)
    holders = tuple(sorted(source.holders))
    return RelayoutPlan(state.history, source.step, source.old, assignment, holders, carried)


def _refuse(state: CoreState, now: float, refusal: Infeasible) -> list[Command]:
    """Wait for more workers; if all are there, what was asked for last cannot be had."""
    commands = wait(state, now, refusal.reason)
    if state.num_staying() < state.policy.max_workers:
        return commands
    if state.former_wish:
        return [*commands, *withdraw(state, refusal), *try_form(state, now)]
    state.ending = Ending("user_error", refusal.reason)
    return commands + end(state, now)


def wait(
    state: CoreState,
    now: float,
    reason: str,
    until: float | None = None,
    is_short: bool = False,
) -> list[Command]:
    """Stay in, or go to, Waiting; a new reason is told once."""
    phase = state.phase
    state.num_given_back = 0
    if not isinstance(phase, Waiting):
        state.enter(Waiting(reason, now, until, is_short))
        return [Waited(reason)]
    is_new = phase.reason != reason
    phase.reason, phase.until, phase.is_short = reason, until, phase.is_short and not is_new
    return [Waited(reason)] if is_new else []


def on_group_formed(state: CoreState, now: float, event: GroupFormed) -> list[Command]:
    phase = state.phase
    if not isinstance(phase, Forming) or event.generation != state.generation:
        return []
    phase.pending.discard(event.worker)
    if phase.pending:
        return []
    note_time(state, now, phase)
    attempt = phase.attempt
    participants = attempt.plan.participants
    deadline = now + state.policy.relayout_timeout_s
    state.enter(Relaying(attempt, set(participants), deadline))
    return [Relayout(state.generation, participants, attempt.source, attempt.path)]


def on_state_ready(state: CoreState, now: float, event: StateReady) -> list[Command]:
    """Resume only after all groups are formed and all state is acknowledged (invariant 7)."""
    phase = state.phase
    if event.generation != state.generation:
        return []
    if isinstance(phase, Aborting):
        _note_arrival(state, phase, event)
    if not isinstance(phase, Relaying):
        return []
    phase.pending.discard(event.worker)
    phase.ready[event.worker] = event
    if phase.pending:
        return []
    return _resume(state, now, phase)


def _note_arrival(state: CoreState, phase: Aborting, event: StateReady) -> None:
    """The re-layout is broken off, but this part of it is there; who only gave has none."""
    for held in state.also_held:
        if held.assignment.generation == event.generation:
            held.holders |= {event.worker} & phase.pending & set(held.assignment.members)


def _resume(state: CoreState, now: float, phase: Relaying) -> list[Command]:
    attempt = phase.attempt
    members = attempt.assignment.members
    if state.held:
        before = Held(state.held.assignment, state.held.holders.intersection(members))
        state.also_held.insert(0, before)
    state.held = Held(attempt.assignment, set(members))
    if state.ending and state.ending.outcome != "completed":
        return [_relaid(state, now, phase), *end(state, now)]  # it has come back to be saved
    begin_shelf(state, now)
    begin_saving(state, now)
    state.guarded_step = guarded_step(state)
    if state.guarded_step == state.committed_step + 1:
        saved = (state.generation, state.committed_step)
        open_upload(state, now, *saved, set(members), attempt.assignment)
    spares = state.warm - state.leaving - set(members)
    state.spare_since = state.idle_since = now if spares else None
    state.num_given_way = 0
    _note_links(state, phase)
    state.enter(Running(now, now))
    state.boundary_at, state.relayout_s = now, now - attempt.started
    held = [phase.ready[worker] for worker in members]
    resume = Resume(
        generation=state.generation,
        step=state.committed_step,
        layout=str(attempt.assignment.layout),
        workers=members,
        state=tuple(WorkerBytes(e.param_bytes, e.grad_bytes, e.optimizer_bytes) for e in held),
        evaluated_step=state.evaluated_step,
        released=attempt.plan.participants[len(members) :],
        left_out=state.left_out,
        guarded_step=state.guarded_step,
    )
    leavers = sorted(state.leaving - set(members))
    state.late_writers.difference_update(leavers)
    relaid = _relaid(state, now, phase)
    return [relaid, resume, *(StopWorker(worker, "it leaves by plan") for worker in leavers)]


def _relaid(state: CoreState, now: float, phase: Relaying) -> Relaid:
    return Relaid(
        state.generation,
        state.committed_step,
        phase.attempt.source,
        sum(event.bytes_moved for event in phase.ready.values()),
        sum(event.bytes_needed for event in phase.ready.values()),
        now - phase.attempt.started,
    )


def _note_links(state: CoreState, phase: Relaying) -> None:
    measured = [
        (worker, peer, speed)
        for worker, event in sorted(phase.ready.items())
        for peer, speed in event.links
    ]
    if measured:
        topology = {worker: seat.place for worker, seat in state.seats.items()}
        state.job = replace(state.job, links=median_speeds(measured, topology))


def next_assignment(state: CoreState, previous: Assignment | None) -> Proposal | Infeasible:
    """Who would train in the next generation, with the state where it lies now."""
    staying = state.staying()
    return propose(
        previous,
        tuple(staying),
        generation=state.generation + 1,
        wish=state.wish,
        topology=staying,
        job=known_job(state),
        memory_bytes=state.least_memory_bytes(),
        snapshots_cover=False,
    )


def _can_come_back(state: CoreState) -> bool:
    """Whether keepers may have what the living lack, and there is somebody to take it."""
    may_have = bool(state.shelves and state.keepers) and not is_saved(state)
    is_able = state.num_staying() >= state.policy.min_workers
    is_able = is_able and state.num_attempts < state.policy.max_attempts
    return may_have and is_able and not living(state)


def _lacking(state: CoreState) -> str:
    """Without what nothing can be formed."""
    num_staying, num_wanted = state.num_staying(), state.policy.min_workers
    if not state.store_port:
        return "the store is starting"
    if state.num_given_way and not state.seats.keys() - state.leaving:
        return f"{num_wanted} workers could not be had at once: they are asked for again later"
    if num_staying < num_wanted:
        return f"{num_staying} of at least {num_wanted} workers are ready"
    if any(upload.is_published for upload in state.uploads.values()) and not living(state):
        return "a newer checkpoint is about to become visible"
    return ""


def _patience_until(state: CoreState) -> float | None:
    """Until when waiting for more than the minimum is worth it, if at all."""
    phase, policy = state.phase, state.policy
    if not isinstance(phase, Waiting) or state.num_staying() >= policy.max_workers:
        return None
    if phase.is_short:
        return None
    if not state.ever_formed:
        return phase.since + policy.start_timeout_s
    if len(state.seats) == len(state.warm):
        return None
    return (state.spare_since or phase.since) + policy.growth_settle_s


def _roll_back(state: CoreState, source: Source) -> RolledBack:
    """All later steps are void."""
    step, from_step = source.step, state.committed_step
    cause = state.rewind.cause if state.rewind else ""
    left_out = left_out_after(state, step)
    newly = tuple(number for number in left_out if number not in state.left_out)
    state.left_out, state.rewind = left_out, None
    state.history = state.generation
    state.committed_step = step
    break_uploads(state)
    state.evaluated_step = min(state.evaluated_step, step)
    state.audited_step = min(state.audited_step, step)
    state.recent_losses = [(at, loss) for at, loss in state.recent_losses if at <= step]
    if state.skipped_since is not None and state.skipped_since > step:
        state.skipped_since = None
    state.last_vote = None
    return RolledBack(state.generation, step, from_step, source.kind, cause, newly)
