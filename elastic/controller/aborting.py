"""Abort of a generation: survivors unwind, then reach the same committed step.

If any worker, even one that has since died, saw the vote of a step, that step commits: every
survivor rolls forward to it (invariant 8). If no worker saw it, the gradients are dropped and
the step is recomputed.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from elastic.controller.capacity.newcomers import defer_or_stop
from elastic.controller.forming import form_or_end, retry_final_save
from elastic.controller.health import on_failed_check
from elastic.controller.memory_shortage import describe, mark_too_big
from elastic.duties import catch_up
from elastic.duties.catch_up import note_vote, record_all
from elastic.duties.checkpoints import stop
from elastic.duties.hang_recovery import choose_workers_to_stop, next_stop_time
from elastic.duties.membership import forget, participants, reject_unfit_worker
from elastic.duties.poison_batches import break_guard, find_poison_batch
from elastic.duties.quarantine import blame
from elastic.duties.recovery import find_live_state
from elastic.duties.uploads import break_upload, lose_uploads
from elastic.protocol.commands import Abort, Command, RollForward, SetAside, StopWorker
from elastic.protocol.controller_events import WorkerAnswered, WorkersStalled
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import HeldState
from elastic.protocol.events import (
    CheckpointDamaged,
    Quiesced,
    RolledForward,
    StopRequested,
    WorkerRaised,
)
from elastic.protocol.phases import (
    Aborting,
    Breakable,
    Ending,
    Forming,
    Resharding,
    Saving,
    newcomers_of,
)


def abort(
    state: ControllerState,
    now: float,
    cause: str,
    num_lost: int = 0,
    is_hang: bool = False,
    suspects: Set[str] = frozenset(),
) -> list[Command]:
    """Abort the generation; its survivors unwind.

    `is_hang` says that an unknown worker hangs during training. `suspects` are workers that do not
    answer probes.
    """
    pending = participants(state)
    broken = state.phase
    state.forming.num_attempts += 1
    state.forming.last_failure = cause
    state.growth.paused_at = None
    state.steps.catch_up = None
    phase = Aborting(
        cause,
        pending,
        deadline=now + state.policy.collective_timeout_s,
        patience=now + state.policy.collective_timeout_s,
        began=now,
        on_gpu=any(state.membership.records[worker].device == "cuda" for worker in pending),
        is_hang=is_hang,
        suspects=pending & suspects,
        suspected_at=now,
        changed_at=now,
        num_lost=num_lost,
        newcomers=newcomers_of(broken),
    )
    if isinstance(broken, Resharding):
        assignment = broken.attempt.assignment
        arrived = broken.ready.keys() & set(assignment.members) & pending
        state.live.also_held.insert(0, HeldState(assignment, arrived))
    state.enter(phase)
    if not pending:
        return _advance(state, now, phase)
    phase.deadline = next_stop_time(state, phase)
    workers = tuple(sorted(pending))
    return [Abort(state.generation, workers, cause, is_hang, state.committed_step)]


def abort_late_reshard(state: ControllerState, now: float, cause: str) -> list[Command]:
    """Abort a reshard that exceeds its time limit: the next one moves less. Only if that does not
    help, newcomers may be the cause."""
    commands = abort(state, now, cause)
    if isinstance(state.phase, Aborting):
        state.phase.excuses_newcomers = state.forming.num_late_reshards == 1
    return commands


def on_raised(state: ControllerState, now: float, event: WorkerRaised) -> list[Command]:
    """React to an exception by its kind: a dead peer, a broken device, too little memory, an unfit
    machine, a worker that holds another step than expected, or a bug in the program."""
    outcome = "user_error" if event.kind == "mistake" else "failed"
    failure = Ending(outcome, _reason(state, event), event.traceback)
    if event.worker not in state.membership.records:
        return []
    if event.kind == "device":
        state.membership.records[event.worker].has_broken_device = True
    if event.worker not in state.membership.warm and event.kind == "health":
        return on_failed_check(state, now, event)
    if event.worker not in state.membership.warm and event.kind == "machine":
        return reject_unfit_worker(state, now, event)
    if event.worker not in state.membership.warm:
        # Before any training the program is at fault; later, this worker's machine.
        if not state.forming.ever_formed and event.kind != "device":
            state.ending = failure
        return [StopWorker(event.worker, event.message)]
    commands: list[Command] = []
    if event.kind in ("device", "machine", "health"):
        commands.append(StopWorker(event.worker, event.message))
    if event.generation != state.generation:
        return commands
    if event.kind == "holding":
        return _distrust_holder(state, now, event, failure.reason)
    if isinstance(state.phase, Saving) and not commands:
        return stop(state, f"the last checkpoint could not be written: {failure.reason}")
    continues = event.kind == "memory" and mark_too_big(state, event)
    if isinstance(state.phase, Breakable):
        commands += abort(state, now, failure.reason)
    ends = event.kind in ("memory", "mistake", "program") and not continues
    phase = state.phase
    if isinstance(phase, Aborting) and continues:
        phase.excuses_newcomers = True
    if ends and isinstance(phase, Aborting):
        _note_cause(phase, event, failure)
    return commands


def _distrust_holder(
    state: ControllerState, now: float, event: WorkerRaised, reason: str
) -> list[Command]:
    """A worker does not hold the expected step: continue with the other workers' holdings."""
    for held in state.live.holdings():
        held.holders.discard(event.worker)
    phase = state.phase
    if isinstance(phase, Breakable):
        return abort(state, now, reason)
    if isinstance(phase, Aborting):
        return on_lost(state, now, event.worker)
    if isinstance(phase, Saving):
        break_upload(state, state.generation, state.committed_step)
        return retry_final_save(state, now)
    return []


def _note_cause(phase: Aborting, event: WorkerRaised, failure: Ending) -> None:
    """An exception is the cause of the abort unless a worker was lost before: then it may follow
    from that loss. Workers lost later do not matter. A newcomer's may have to do with its
    machine."""
    if event.kind == "program" and event.worker in phase.newcomers:
        phase.failed.add(event.worker)
    elif phase.raised is None and not phase.num_lost:
        phase.raised = failure


def on_stop_requested(state: ControllerState, now: float, event: StopRequested) -> list[Command]:
    """End at the next step boundary. If the workers hold the state, the controller does not wait
    for forming, resharding, or a hanging worker."""
    state.ending = state.ending or Ending("interrupted", event.cause)
    phase = state.phase
    if isinstance(phase, Forming | Resharding) and find_live_state(state):
        return abort(state, now, event.cause)
    if isinstance(phase, Aborting):
        phase.deadline = max(now, next_stop_time(state, phase))
    return []


def on_damaged(state: ControllerState, now: float, event: CheckpointDamaged) -> list[Command]:
    """Never use a damaged checkpoint again; if it is being read, abort and use another source."""
    damaged = [saved for saved in state.checkpoints.saved if saved.path == event.path]
    state.checkpoints.saved = [
        saved for saved in state.checkpoints.saved if saved.path != event.path
    ]
    commands: list[Command] = [SetAside(saved.step, saved.generation) for saved in damaged]
    phase = state.phase
    is_read = isinstance(phase, Resharding) and phase.attempt.path == event.path
    if not is_read or event.generation != state.generation:
        return commands
    return commands + abort(state, now, event.cause)


def _reason(state: ControllerState, event: WorkerRaised) -> str:
    """The text of an exception. For out of memory, it adds the bytes and a layout that fits."""
    if event.kind == "mistake":
        return event.message  # the same on each worker
    reason = f"{event.worker}: {event.message}"
    if event.kind != "memory":
        return reason
    return f"{reason}; {describe(state, event)}"


def on_quiesced(state: ControllerState, now: float, event: Quiesced) -> list[Command]:
    """A worker has unwound; when all have, continue with the recovery."""
    phase = state.phase
    if not isinstance(phase, Aborting) or event.generation != state.generation:
        return []
    if event.worker not in phase.pending or state.steps.catch_up:
        return []
    if phase.rolling_forward is not None:
        return _give_up_rolling_forward(state, now, event)
    phase.pending.discard(event.worker)
    phase.suspects.discard(event.worker)  # it has answered
    phase.last_unwound_s, phase.changed_at = now - phase.began, now
    phase.reports[event.worker] = event
    commands = _learn(state, event)
    if phase.pending:
        phase.deadline = next_stop_time(state, phase)
        return commands
    return commands + _advance(state, now, phase)


def on_rolled_forward(state: ControllerState, now: float, event: RolledForward) -> list[Command]:
    """A survivor has applied the decided step; when all have, continue with the recovery."""
    phase = state.phase
    if not isinstance(phase, Aborting) or event.generation != state.generation:
        return []
    if phase.rolling_forward is None or event.worker not in phase.pending:
        return []
    phase.pending.discard(event.worker)
    report = phase.reports[event.worker]
    phase.reports[event.worker] = replace(report, committed_step=event.record.step)
    commands = record_all(state, (event.record,))
    if phase.pending:
        return commands
    phase.rolling_forward = None
    return commands + _advance(state, now, phase)


def _give_up_rolling_forward(state: ControllerState, now: float, event: Quiesced) -> list[Command]:
    """Stop a worker whose apply of the decided step failed. Ignore an older report of that
    worker."""
    if not event.torn:
        return []
    cause = "its apply of the decided step failed"
    forget(state, now, event.worker, cause)
    return [StopWorker(event.worker, cause), *on_lost(state, now, event.worker)]


def on_lost(state: ControllerState, now: float, worker: str) -> list[Command]:
    """A worker died while the survivors unwind, roll forward or send records."""
    phase = state.phase
    assert isinstance(phase, Aborting)
    was_expected = worker in phase.pending
    phase.num_lost += was_expected or worker in phase.reports
    if was_expected:
        phase.has_lost_pending, phase.changed_at = True, now
    phase.pending.discard(worker)
    phase.reports.pop(worker, None)
    if state.steps.catch_up:
        return catch_up.on_lost(state, now, worker)
    if phase.pending:
        phase.deadline = next_stop_time(state, phase)
    if phase.pending or not was_expected:
        return []
    phase.rolling_forward = None
    return _advance(state, now, phase)


def on_suspected(state: ControllerState, now: float, worker: str) -> list[Command]:
    """Shorten the deadline for a worker that does not answer probes."""
    phase = state.phase
    assert isinstance(phase, Aborting)
    if worker not in phase.pending:
        return []
    if state.steps.catch_up:
        return catch_up.on_lost(state, now, worker)
    phase.suspects.add(worker)
    phase.suspected_at = now
    phase.deadline = next_stop_time(state, phase)
    return []


def on_watched(state: ControllerState, event: WorkerAnswered | WorkersStalled) -> list[Command]:
    """Note what probes report: stalled workers, and suspects that answer again."""
    if isinstance(event, WorkersStalled):
        if event.generation == state.generation:
            state.steps.stalled = event.workers
        return []
    phase = state.phase
    if isinstance(phase, Aborting) and event.worker in phase.suspects & phase.pending:
        phase.suspects.discard(event.worker)
        phase.deadline = next_stop_time(state, phase)
    return []


def on_deadline(state: ControllerState, now: float) -> list[Command]:
    """Stop pending workers whose time to unwind has passed."""
    phase = state.phase
    assert isinstance(phase, Aborting)
    overdue, phase.deadline = choose_workers_to_stop(state, phase, now)
    cause = "it did not unwind in time"
    commands: list[Command] = [StopWorker(worker, cause) for worker in sorted(overdue)]
    for worker in sorted(overdue):
        commands += blame(state, now, worker, cause)
        forget(state, now, worker, cause)
        if state.phase is phase:
            commands += on_lost(state, now, worker)
    return commands


def _advance(state: ControllerState, now: float, phase: Aborting) -> list[Command]:
    """No worker is pending: bring the survivors to one step, then the controller, then continue."""
    torn = [w for w, report in phase.reports.items() if report.torn]
    commands = _drop(state, now, phase, torn, "its apply failed half-way")
    vote, holders = state.steps.last_vote, state.live.held.holders if state.live.held else set()
    reports = [phase.reports[w] for w in sorted(phase.reports) if w in holders]
    newest_step = max((report.committed_step for report in reports), default=0)
    newest_step = max(newest_step, state.committed_step, vote.step if vote else 0)
    late = [report for report in reports if report.committed_step < newest_step]
    is_decided = vote is not None and vote.step == newest_step
    behind = {
        report.worker
        for report in late
        if is_decided and report.gradients_complete and report.committed_step == newest_step - 1
    }
    unreachable = [report.worker for report in late if report.worker not in behind]
    commands += _drop(state, now, phase, unreachable, "it cannot reach the other workers' step")
    if vote is not None and behind:
        phase.rolling_forward = vote
        phase.pending = behind
        phase.deadline = phase.patience = now + state.policy.collective_timeout_s
        return [*commands, RollForward(state.generation, tuple(sorted(behind)), vote)]
    if len(reports) > len(late) and newest_step > state.committed_step:
        return commands + catch_up.begin(state, now, newest_step)
    return commands + _continue_after_abort(state, now, phase)


def on_caught_up(state: ControllerState, now: float) -> list[Command]:
    """The controller now has the records of all steps that the survivors have committed."""
    phase = state.phase
    assert isinstance(phase, Aborting)
    phase.pending = set()
    return _advance(state, now, phase)


def _drop(
    state: ControllerState, now: float, phase: Aborting, workers: list[str], cause: str
) -> list[Command]:
    """Stop workers that cannot reach the other workers' step."""
    for worker in workers:
        forget(state, now, worker, cause)
        del phase.reports[worker]
    return [StopWorker(worker, cause) for worker in workers]


def _learn(state: ControllerState, report: Quiesced) -> list[Command]:
    """Note the vote and records of a holder now: it may die before the others report."""
    if not state.live.held or report.worker not in state.live.held.holders:
        return []
    note_vote(state, report.vote)
    return record_all(state, report.records)


def _lose_parts(state: ControllerState, now: float, phase: Aborting) -> None:
    """Give up checkpoints that a survivor writes no part of: it unwound, or rolled forward to their
    step, before it began."""
    newest = {worker: report.saving_step for worker, report in phase.reports.items()}
    lose_uploads(
        state, now, lambda lost: any(newest.get(w, lost.step) < lost.step for w in lost.pending)
    )


def _continue_after_abort(state: ControllerState, now: float, phase: Aborting) -> list[Command]:
    """Decide whether the run ends, then form the next generation or end."""
    if find_live_state(state):
        break_guard(state)
    _lose_parts(state, now, phase)
    commands = defer_or_stop(state, now, phase)
    if phase.raised:
        state.ending = state.ending or phase.raised
    elif (
        state.committed_step >= state.job.steps
        and find_live_state(state)
        and not state.rollbacks.request
        and (not state.job.runs_script or state.forming.num_attempts >= state.policy.max_attempts)
    ):
        state.ending = state.ending or Ending("completed")
    elif poison_reason := find_poison_batch(state):
        state.ending = state.ending or Ending("failed", poison_reason)
    elif state.forming.num_attempts >= state.policy.max_attempts:
        reason = (
            f"{state.forming.num_attempts} recoveries without a committed step "
            f"(failure.max_attempts); the last cause: {phase.cause}"
        )
        state.ending = state.ending or Ending("failed", reason)
    return commands + form_or_end(state, now)
