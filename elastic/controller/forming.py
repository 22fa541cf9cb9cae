"""Forming of a generation: choose the state, assign the ranks, form groups, reshard, resume."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from elastic.controller.capacity.next_assignment import (
    can_train,
    next_assignment,
    note_reshard,
    reshard_timeout_s,
)
from elastic.controller.health import compare_devices, compare_links
from elastic.duties.bandwidth import median_speeds
from elastic.duties.catch_up import mark_missing
from elastic.duties.checkpoints import begin_saving, drop_voided, end, is_saved
from elastic.duties.layout_requests import withdraw
from elastic.duties.poison_batches import guarded_step
from elastic.duties.quarantine import release_standbys
from elastic.duties.recovery import StateSource, choose_source, find_live_state
from elastic.duties.rollback import discard_live_state, skipped_batches_after
from elastic.duties.snapshots import begin_snapshot_set, query_snapshot_servers, retire_snapshot_set
from elastic.duties.uploads import break_uploads, open_upload
from elastic.geometry.assignment import Assignment
from elastic.geometry.errors import Infeasible
from elastic.protocol.commands import Command, Form, Reshard, Resume, StopWorker, WorkerBytes
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import HeldState
from elastic.protocol.events import GroupFormed, StateReady
from elastic.protocol.notes import Resharded, RolledBack, Waited
from elastic.protocol.phases import Aborting, Attempt, Ending, Forming, Resharding, Running, Waiting
from elastic.reshard.reshard_plan import CarriedPart, ReshardPlan
from elastic.reshard.snapshot_placement import choose_carriers

NUM_RECENT_FORMINGS = 4
ARRIVAL_SHARE = 1 / 6
"""A start waits this share of `start_timeout_s` for the next arrival."""


def form_or_end(state: ControllerState, now: float) -> list[Command]:
    """Form the next generation, or end the run. A state that only snapshot servers hold is restored
    first, so that it can be saved."""
    discard_live_state(state)
    if state.ending and not _can_restore_to_save(state):
        return end(state, now)
    return release_standbys(state) + try_form(state, now)


def retry_final_save(state: ControllerState, now: float) -> list[Command]:
    """A writer of the last checkpoint is gone, or does not hold the expected step. A completed run
    whose state is lost rolls back."""
    if state.ending == Ending("completed") and not find_live_state(state):
        state.ending = None
    return form_or_end(state, now)


def try_form(state: ControllerState, now: float) -> list[Command]:
    """Form the next generation if enough workers are ready; else wait, with a reason."""
    queries = query_snapshot_servers(state, now)
    if state.snapshots.pending and not find_live_state(state):
        is_short = isinstance(state.phase, Aborting)
        return queries + wait(state, now, "snapshot servers are queried", is_short=is_short)
    missing = _missing_precondition(state)
    if missing:
        return wait(state, now, missing)
    until = _patience_until(state)
    if until is not None and now < until:
        return wait(state, now, _shortage(state, now), until)
    source = choose_source(state)
    if state.ending and source.old is None:
        return end(state, now)
    commands = compare_devices(state, now, partial(can_train, state))
    proposal = next_assignment(state, source.old)
    if isinstance(proposal, Infeasible):
        return commands + (end(state, now) if state.ending else _refuse(state, now, proposal))
    assignment = proposal.assignment
    held_now = state.live.holdings() if source.old and source.step == state.committed_step else []
    if source.step > state.committed_step:  # snapshots of steps that no live worker has reported
        commands += mark_missing(state, now, source.step)
    state.generation = assignment.generation
    state.layouts.former = None
    state.steps.begin_generation()
    if source.step < state.committed_step:
        commands.append(_roll_back(state, source))
        commands += drop_voided(state)
    plan = _plan(state, source, assignment)
    participants = set(plan.participants)
    _keep_held(state, source, participants, held_now)
    if source.old is None:
        break_uploads(state)  # their steps will be recomputed with different bits
    retire_snapshot_set(state, source.step)
    state.steps.measured.expect(assignment.layout, proposal.step_s)
    attempt = Attempt(assignment, plan, source.kind, source.path, now)
    state.forming.ever_formed = True
    state.enter(Forming(attempt, participants, now + _timeout_s(state, len(participants))))
    form = Form(
        state.generation,
        assignment,
        plan,
        state.store.host,
        state.store.port,
        tuple(
            state.snapshots.servers[n]
            for n in sorted({n for part in plan.carried for n in part.nodes})
        ),
        proposal.reason,
        proposal.refusals,
    )
    return [*commands, form]


def _timeout_s(state: ControllerState, num_participants: int) -> float:
    """How long forming may take: more for many workers, and for a busy cluster. Late formings
    raise it up to the timeout of collectives, so a worker that never connects does not stop the run
    for hours."""
    policy, measured_s = state.policy, max(state.forming.recent_form_s, default=0.0)
    scaled_s = policy.form_timeout_per_worker_s * num_participants
    raised_s = min(policy.form_factor * measured_s, policy.collective_timeout_s)
    return max(policy.form_timeout_s, raised_s, scaled_s)


def note_time(state: ControllerState, now: float, phase: Forming) -> None:
    """Note how long forming took, or has taken when it timed out; the next timeout is a multiple of
    it."""
    took_s = now - phase.attempt.started
    state.forming.recent_form_s = [*state.forming.recent_form_s[1 - NUM_RECENT_FORMINGS :], took_s]


def _keep_held(
    state: ControllerState, source: StateSource, participants: set[str], held_now: list[HeldState]
) -> None:
    """Note which holdings remain. On `Form`, its participants drop what they hold under any other
    assignment; other workers keep it until a step commits."""
    remaining = [HeldState(held.assignment, held.holders - participants) for held in held_now]
    state.live.held = HeldState(source.old, set(source.holders)) if source.old else None
    state.live.also_held = [
        held for held in remaining if held.holders and held.assignment != source.old
    ]


def _plan(state: ControllerState, source: StateSource, assignment: Assignment) -> ReshardPlan:
    """The reshard plan from the source to the new assignment."""
    carried: tuple[CarriedPart, ...] = ()
    if source.old and (source.snapshots or source.remade):
        available = state.membership.staying()
        carried = choose_carriers(
            source.old, source.snapshots, assignment, available, source.remade
        )
    holders = tuple(sorted(source.holders))
    return ReshardPlan(state.lineage, source.step, source.old, assignment, holders, carried)


def _refuse(state: ControllerState, now: float, refusal: Infeasible) -> list[Command]:
    """Wait for more workers. If all are there, withdraw the last layout request, or end the run."""
    commands = wait(state, now, refusal.reason)
    if state.membership.num_staying() < state.policy.max_workers:
        return commands
    if state.layouts.former:
        return [*commands, *withdraw(state, refusal), *try_form(state, now)]
    state.ending = Ending("user_error", refusal.reason)
    return commands + end(state, now)


def wait(
    state: ControllerState,
    now: float,
    reason: str,
    until: float | None = None,
    is_short: bool = False,
) -> list[Command]:
    """Enter or stay in Waiting; a new reason is reported once."""
    phase = state.phase
    state.growth.num_given_back = 0
    if not isinstance(phase, Waiting):
        state.growth.paused_at = None  # waiting for workers is no part of a planned pause
        state.enter(Waiting(reason, now, until, is_short))
        return [Waited(reason)]
    is_new = phase.reason != reason
    phase.reason, phase.until, phase.is_short = reason, until, phase.is_short and not is_new
    return [Waited(reason)] if is_new else []


def on_group_formed(state: ControllerState, now: float, event: GroupFormed) -> list[Command]:
    """A worker has formed its groups; when all have, reshard."""
    phase = state.phase
    if not isinstance(phase, Forming) or event.generation != state.generation:
        return []
    phase.pending.discard(event.worker)
    if phase.pending:
        return []
    note_time(state, now, phase)
    attempt = phase.attempt
    participants = attempt.plan.participants
    limit_s = reshard_timeout_s(state, attempt.plan.old, attempt.assignment)
    state.enter(Resharding(attempt, set(participants), now + limit_s))
    return [Reshard(state.generation, participants, attempt.source, attempt.path)]


def on_state_ready(state: ControllerState, now: float, event: StateReady) -> list[Command]:
    """Resume only after all groups are formed and all state is acknowledged (invariant 7)."""
    phase = state.phase
    if event.generation != state.generation:
        return []
    if isinstance(phase, Aborting):
        _note_late_holder(state, phase, event)
    if not isinstance(phase, Resharding):
        return []
    phase.pending.discard(event.worker)
    phase.ready[event.worker] = event
    if phase.pending:
        return []
    note_reshard(state, phase, is_late=False)
    return _resume(state, now, phase)


def _note_late_holder(state: ControllerState, phase: Aborting, event: StateReady) -> None:
    """The reshard was aborted, but this worker's new part is complete. A worker that only sent has
    none."""
    for held in state.live.also_held:
        if held.assignment.generation == event.generation:
            held.holders |= {event.worker} & phase.pending & set(held.assignment.members)


def _resume(state: ControllerState, now: float, phase: Resharding) -> list[Command]:
    """Training starts under the new assignment; released workers stop."""
    attempt = phase.attempt
    members = attempt.assignment.members
    if state.live.held:
        before = HeldState(
            state.live.held.assignment, state.live.held.holders.intersection(members)
        )
        state.live.also_held.insert(0, before)
    state.live.held = HeldState(attempt.assignment, set(members))
    if state.ending and state.ending.outcome != "completed":
        return [_resharded(state, now, phase), *end(state, now)]  # restored only to be saved
    begin_snapshot_set(state, now)
    begin_saving(state, now)
    state.poison.guarded_step = guarded_step(state)
    if state.poison.guarded_step == state.committed_step + 1:
        saved = (state.generation, state.committed_step)
        open_upload(state, now, *saved, set(members), attempt.assignment)
    standbys = state.membership.warm - state.membership.draining - set(members)
    state.growth.standby_since = state.growth.idle_since = now if standbys else None
    state.gang.num_backoffs = 0
    slow_links = _note_bandwidths(state, now, phase)
    state.enter(Running(now, now))
    state.steps.boundary_at, state.forming.reshard_s = now, now - attempt.started
    held = [phase.ready[worker] for worker in members]
    resume = Resume(
        generation=state.generation,
        step=state.committed_step,
        layout=str(attempt.assignment.layout),
        workers=members,
        state=tuple(WorkerBytes(e.param_bytes, e.grad_bytes, e.optimizer_bytes) for e in held),
        evaluated_step=state.evaluated_step,
        released=attempt.plan.participants[len(members) :],
        skipped_batches=state.rollbacks.skipped_batches,
        guarded_step=state.poison.guarded_step,
    )
    draining_workers = sorted(state.membership.draining - set(members))
    state.checkpoints.late_writers.difference_update(draining_workers)
    resharded = _resharded(state, now, phase)
    return [
        resharded,
        resume,
        *slow_links,
        *(StopWorker(worker, "it was drained") for worker in draining_workers),
    ]


def _resharded(state: ControllerState, now: float, phase: Resharding) -> Resharded:
    return Resharded(
        state.generation,
        state.committed_step,
        phase.attempt.source,
        sum(event.bytes_moved for event in phase.ready.values()),
        sum(event.bytes_needed for event in phase.ready.values()),
        now - phase.attempt.started,
    )


def _note_bandwidths(state: ControllerState, now: float, phase: Resharding) -> list[Command]:
    measured = [
        (worker, peer, speed)
        for worker, event in sorted(phase.ready.items())
        for peer, speed in event.bandwidths
    ]
    if measured:
        topology = {
            worker: worker_record.place
            for worker, worker_record in state.membership.records.items()
        }
        state.job = replace(state.job, bandwidths=median_speeds(measured, topology))
    return compare_links(state, now, measured, partial(can_train, state))


def _can_restore_to_save(state: ControllerState) -> bool:
    """Whether snapshot servers may hold the state that live workers lack, and workers can restore
    it."""
    may_have = bool(state.snapshots.sets and state.snapshots.servers) and not is_saved(state)
    can_form = state.membership.num_staying() >= state.policy.min_workers
    can_form = can_form and state.forming.num_attempts < state.policy.max_attempts
    return may_have and can_form and not find_live_state(state)


def _missing_precondition(state: ControllerState) -> str:
    """Why no generation can form now; empty if one can."""
    num_staying, num_wanted = state.membership.num_staying(), state.policy.min_workers
    if not state.store.port:
        return "the store is starting"
    if state.gang.num_backoffs and not state.membership.records.keys() - state.membership.draining:
        return f"{num_wanted} workers were not available at once: they are requested again later"
    if num_staying < num_wanted:
        return f"{num_staying} of at least {num_wanted} workers are ready"
    if any(
        upload.is_published for upload in state.checkpoints.uploads.values()
    ) and not find_live_state(state):
        return "a newer checkpoint is about to be published"
    return ""


def _patience_until(state: ControllerState) -> float | None:
    """Until when to wait for more workers than the minimum; None if waiting is not worth it."""
    phase, policy = state.phase, state.policy
    if not isinstance(phase, Waiting) or state.membership.num_staying() >= policy.max_workers:
        return None
    if phase.is_short:
        return None
    if not state.forming.ever_formed:
        return _start_time(state, phase)
    if len(state.membership.records) == len(state.membership.warm):
        return None
    return (state.growth.standby_since or phase.since) + policy.growth_wait_s


def _shortage(state: ControllerState, now: float) -> str:
    """How many workers are ready, and whether a start that is due waits for others."""
    text = f"{state.membership.num_staying()} of {state.policy.max_workers} workers are ready"
    phase = state.phase
    is_due = isinstance(phase, Waiting) and now >= phase.since + state.policy.start_timeout_s
    if state.forming.ever_formed or not is_due:
        return text
    return f"{text}: growth.start_timeout_s has passed, but others keep arriving"


def _start_time(state: ControllerState, phase: Waiting) -> float:
    """When the run starts with the workers that are ready. While most are not and others become
    ready, it waits on, at most as long again: a start with few costs a growth for each arrival."""
    policy, warm = state.policy, state.membership.warm
    begin = phase.since + policy.start_timeout_s
    if 2 * len(warm) >= policy.max_workers:
        return begin
    patience_s = ARRIVAL_SHARE * policy.start_timeout_s
    arrived_s = state.membership.joined_at + patience_s
    return min(max(begin, arrived_s), begin + policy.start_timeout_s)


def _roll_back(state: ControllerState, source: StateSource) -> RolledBack:
    """Roll the state back to the source's step; all later steps are void."""
    step, from_step = source.step, state.committed_step
    cause = state.rollbacks.request.cause if state.rollbacks.request else ""
    skipped_batches = skipped_batches_after(state, step)
    newly_skipped = tuple(
        number for number in skipped_batches if number not in state.rollbacks.skipped_batches
    )
    state.rollbacks.skipped_batches, state.rollbacks.request = skipped_batches, None
    state.growth.paused_at = None  # reading a checkpoint is no part of a planned pause
    break_uploads(state)
    state.roll_back(step)
    return RolledBack(state.generation, step, from_step, source.kind, cause, newly_skipped)
