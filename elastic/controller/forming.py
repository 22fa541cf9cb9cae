"""Forming a generation: choose the state, assign the ranks, form, move, resume."""

from __future__ import annotations

from dataclasses import replace

from elastic.duties.bandwidth import known_job, median_speeds
from elastic.duties.catch_up import mark_missing
from elastic.duties.checkpoints import begin_saving, drop_voided, end, is_saved
from elastic.duties.layout_requests import withdraw
from elastic.duties.poison_batches import guarded_step
from elastic.duties.quarantine import release_standbys
from elastic.duties.recovery import StateSource, choose_source, living
from elastic.duties.rollback import let_go_of_the_living, skipped_batches_after
from elastic.duties.snapshots import begin_snapshot_set, query_snapshot_servers, retire_snapshot_set
from elastic.duties.uploads import break_uploads, open_upload
from elastic.geometry.assignment import Assignment
from elastic.geometry.errors import Infeasible
from elastic.planner.proposal import Proposal, propose
from elastic.protocol.commands import (
    Command,
    Form,
    Reshard,
    Resharded,
    Resume,
    RolledBack,
    StopWorker,
    Waited,
    WorkerBytes,
)
from elastic.protocol.controller_state import CoreState, HeldState
from elastic.protocol.events import GroupFormed, StateReady
from elastic.protocol.phases import Aborting, Attempt, Ending, Forming, Resharding, Running, Waiting
from elastic.reshard.reshard_plan import Carried, ReshardPlan
from elastic.reshard.snapshot_placement import carry

NUM_RECENT_FORMINGS = 4


def go_on(state: CoreState, now: float) -> list[Command]:
    """Form the next generation, or end; a state that only keepers have comes back first, so that
    it can be saved."""
    let_go_of_the_living(state)
    if state.ending and not _can_come_back(state):
        return end(state, now)
    return release_standbys(state) + try_form(state, now)


def save_anew(state: CoreState, now: float) -> list[Command]:
    """A writer of the last checkpoint is gone, or does not hold what it was thought to. A complete
    run whose state is lost goes back."""
    if state.ending == Ending("completed") and not living(state):
        state.ending = None
    return go_on(state, now)


def try_form(state: CoreState, now: float) -> list[Command]:
    """Form the next generation if enough workers are there; else wait, with the reason."""
    asking = query_snapshot_servers(state, now)
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
    state.former_target = None
    state.unheard, state.standing_still = (0, 0), ()
    if source.step < state.committed_step:
        commands.append(_roll_back(state, source))
        commands += drop_voided(state)
    plan = _plan(state, source, assignment)
    participants = set(plan.participants)
    _keep_held(state, source, participants, of_this_step)
    if source.old is None:
        break_uploads(state)  # of steps that will be redone, and their bits will differ
    retire_snapshot_set(state, source.step)
    attempt = Attempt(assignment, plan, source.kind, source.path, now)
    state.ever_formed = True
    state.enter(Forming(attempt, participants, now + _timeout_s(state, len(participants))))
    form = Form(
        state.generation,
        assignment,
        plan,
        state.store_host,
        state.store_port,
        tuple(
            state.snapshot_servers[n]
            for n in sorted({n for part in plan.carried for n in part.nodes})
        ),
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
    state: CoreState, source: StateSource, participants: set[str], of_this_step: list[HeldState]
) -> None:
    """With `Form` its participants forget what they hold under any other assignment; a worker that
    is left out of it keeps that, until a step commits."""
    left = [HeldState(held.assignment, held.holders - participants) for held in of_this_step]
    state.held = HeldState(source.old, set(source.holders)) if source.old else None
    state.also_held = [held for held in left if held.holders and held.assignment != source.old]


def _plan(state: CoreState, source: StateSource, assignment: Assignment) -> ReshardPlan:
    carried: tuple[Carried, ...] = ()
    if source.old and (source.snapshots or source.remade):
        staying = state.staying()
        carried = carry(source.old, source.snapshots, assignment, staying, source.remade)
    holders = tuple(sorted(source.holders))
    return ReshardPlan(state.lineage, source.step, source.old, assignment, holders, carried)


def _refuse(state: CoreState, now: float, refusal: Infeasible) -> list[Command]:
    """Wait for more workers; if all are there, what was asked for last cannot be had."""
    commands = wait(state, now, refusal.reason)
    if state.num_staying() < state.policy.max_workers:
        return commands
    if state.former_target:
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
    deadline = now + state.policy.reshard_timeout_s
    state.enter(Resharding(attempt, set(participants), deadline))
    return [Reshard(state.generation, participants, attempt.source, attempt.path)]


def on_state_ready(state: CoreState, now: float, event: StateReady) -> list[Command]:
    """Resume only after all groups are formed and all state is acknowledged (invariant 7)."""
    phase = state.phase
    if event.generation != state.generation:
        return []
    if isinstance(phase, Aborting):
        _note_arrival(state, phase, event)
    if not isinstance(phase, Resharding):
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


def _resume(state: CoreState, now: float, phase: Resharding) -> list[Command]:
    attempt = phase.attempt
    members = attempt.assignment.members
    if state.held:
        before = HeldState(state.held.assignment, state.held.holders.intersection(members))
        state.also_held.insert(0, before)
    state.held = HeldState(attempt.assignment, set(members))
    if state.ending and state.ending.outcome != "completed":
        return [_resharded(state, now, phase), *end(state, now)]  # it has come back to be saved
    begin_snapshot_set(state, now)
    begin_saving(state, now)
    state.guarded_step = guarded_step(state)
    if state.guarded_step == state.committed_step + 1:
        saved = (state.generation, state.committed_step)
        open_upload(state, now, *saved, set(members), attempt.assignment)
    standbys = state.warm - state.draining - set(members)
    state.standby_since = state.idle_since = now if standbys else None
    state.num_gang_backoffs = 0
    _note_bandwidths(state, phase)
    state.enter(Running(now, now))
    state.boundary_at, state.reshard_s = now, now - attempt.started
    held = [phase.ready[worker] for worker in members]
    resume = Resume(
        generation=state.generation,
        step=state.committed_step,
        layout=str(attempt.assignment.layout),
        workers=members,
        state=tuple(WorkerBytes(e.param_bytes, e.grad_bytes, e.optimizer_bytes) for e in held),
        evaluated_step=state.evaluated_step,
        released=attempt.plan.participants[len(members) :],
        skipped_batches=state.skipped_batches,
        guarded_step=state.guarded_step,
    )
    draining_workers = sorted(state.draining - set(members))
    state.late_writers.difference_update(draining_workers)
    resharded = _resharded(state, now, phase)
    return [
        resharded,
        resume,
        *(StopWorker(worker, "it leaves by plan") for worker in draining_workers),
    ]


def _resharded(state: CoreState, now: float, phase: Resharding) -> Resharded:
    return Resharded(
        state.generation,
        state.committed_step,
        phase.attempt.source,
        sum(event.bytes_moved for event in phase.ready.values()),
        sum(event.bytes_needed for event in phase.ready.values()),
        now - phase.attempt.started,
    )


def _note_bandwidths(state: CoreState, phase: Resharding) -> None:
    measured = [
        (worker, peer, speed)
        for worker, event in sorted(phase.ready.items())
        for peer, speed in event.bandwidths
    ]
    if measured:
        topology = {
            worker: worker_record.place for worker, worker_record in state.worker_records.items()
        }
        state.job = replace(state.job, bandwidths=median_speeds(measured, topology))


def next_assignment(state: CoreState, previous: Assignment | None) -> Proposal | Infeasible:
    """Who would train in the next generation, with the state where it lies now."""
    staying = state.staying()
    return propose(
        previous,
        tuple(staying),
        generation=state.generation + 1,
        target_layout=state.target_layout,
        topology=staying,
        job=known_job(state),
        memory_bytes=state.least_memory_bytes(),
        snapshots_cover=False,
    )


def _can_come_back(state: CoreState) -> bool:
    """Whether keepers may have what the living lack, and there is somebody to take it."""
    may_have = bool(state.snapshot_sets and state.snapshot_servers) and not is_saved(state)
    is_able = state.num_staying() >= state.policy.min_workers
    is_able = is_able and state.num_attempts < state.policy.max_attempts
    return may_have and is_able and not living(state)


def _lacking(state: CoreState) -> str:
    """Without what nothing can be formed."""
    num_staying, num_wanted = state.num_staying(), state.policy.min_workers
    if not state.store_port:
        return "the store is starting"
    if state.num_gang_backoffs and not state.worker_records.keys() - state.draining:
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
    if len(state.worker_records) == len(state.warm):
        return None
    return (state.standby_since or phase.since) + policy.growth_settle_s


def _roll_back(state: CoreState, source: StateSource) -> RolledBack:
    """All later steps are void."""
    step, from_step = source.step, state.committed_step
    cause = state.rollback.cause if state.rollback else ""
    skipped_batches = skipped_batches_after(state, step)
    newly = tuple(number for number in skipped_batches if number not in state.skipped_batches)
    state.skipped_batches, state.rollback = skipped_batches, None
    state.lineage = state.generation
    state.committed_step = step
    break_uploads(state)
    state.evaluated_step = min(state.evaluated_step, step)
    state.audited_step = min(state.audited_step, step)
    state.recent_losses = [(at, loss) for at, loss in state.recent_losses if at <= step]
    if state.skipped_since is not None and state.skipped_since > step:
        state.skipped_since = None
    state.last_vote = None
    return RolledBack(state.generation, step, from_step, source.kind, cause, newly)
