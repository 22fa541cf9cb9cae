"""Aborting: unwind the survivors, then bring all of them to one step.

A vote that anybody has seen decides its step, be he alive or dead: every survivor rolls forward
to it (DESIGN section 6). If nobody has seen it, the gradients are dropped and the step is redone.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from elastic.controller.forming import go_on, save_anew
from elastic.duties import catch_up
from elastic.duties.catch_up import note_vote, record_all
from elastic.duties.checkpoints import stop
from elastic.duties.hang_timeouts import due, next_end
from elastic.duties.membership import forget, participants, turn_away_unfit
from elastic.duties.poison_batches import break_guard, verdict
from elastic.duties.recovery import living
from elastic.duties.uploads import break_upload
from elastic.planner.fitting_layouts import Shortage, advice
from elastic.protocol.commands import Abort, Command, RollForward, SetAside, StopWorker
from elastic.protocol.controller_events import WorkerAnswered, WorkersStalled
from elastic.protocol.controller_state import CoreState, HeldState
from elastic.protocol.events import (
    CheckpointDamaged,
    Quiesced,
    RolledForward,
    StopRequested,
    WorkerRaised,
)
from elastic.protocol.phases import Aborting, Breakable, Ending, Forming, Resharding, Saving


def abort(
    state: CoreState,
    now: float,
    cause: str,
    num_lost: int = 0,
    is_hang: bool = False,
    suspects: Set[str] = frozenset(),
) -> list[Command]:
    """Break off the generation; its survivors unwind.

    With `is_hang` some worker stands still amid training, and nobody knows which; `suspects` are
    known not to answer.
    """
    pending = participants(state)
    broken = state.phase
    state.num_attempts += 1
    state.last_failure = cause
    state.paused_at = None
    state.catch_up = None
    phase = Aborting(
        cause,
        pending,
        deadline=now + state.policy.collective_timeout_s,
        patience=now + state.policy.collective_timeout_s,
        began=now,
        on_gpu=any(state.worker_records[worker].device == "cuda" for worker in pending),
        is_hang=is_hang,
        suspects=pending & suspects,
        suspected_at=now,
        changed_at=now,
        num_lost=num_lost,
    )
    if isinstance(broken, Resharding):
        assignment = broken.attempt.assignment
        arrived = broken.ready.keys() & set(assignment.members) & pending
        state.also_held.insert(0, HeldState(assignment, arrived))
    state.enter(phase)
    if not pending:
        return _advance(state, now, phase)
    phase.deadline = next_end(state, phase)
    workers = tuple(sorted(pending))
    return [Abort(state.generation, workers, cause, is_hang, state.committed_step)]


def on_raised(state: CoreState, now: float, event: WorkerRaised) -> list[Command]:
    """Sort an exception: a peer's death, a broken device, too little memory, a machine that lacks
    something, a worker that holds another step than was thought, or a bug."""
    failure = Ending("failed", _reason(state, event), event.traceback)
    if event.worker not in state.worker_records:
        return []
    if event.kind == "device":
        state.worker_records[event.worker].has_broken_device = True
    if event.worker not in state.warm and event.kind == "machine":
        return turn_away_unfit(state, now, event)
    if event.worker not in state.warm:
        # Before anything has trained it is the program's fault; later, that machine's.
        if not state.ever_formed and event.kind != "device":
            state.ending = failure
        return [StopWorker(event.worker, event.message)]
    commands: list[Command] = []
    if event.kind in ("device", "machine"):
        commands.append(StopWorker(event.worker, event.message))
    if event.generation != state.generation:
        return commands
    if event.kind == "holding":
        return _distrust_holder(state, now, event, failure.reason)
    if isinstance(state.phase, Saving) and not commands:
        return stop(state, f"the last checkpoint could not be written: {failure.reason}")
    if isinstance(state.phase, Breakable):
        commands += abort(state, now, failure.reason)
    if event.kind in ("memory", "program") and isinstance(state.phase, Aborting):
        _note_cause(state.phase, failure)
    return commands


def _distrust_holder(
    state: CoreState, now: float, event: WorkerRaised, reason: str
) -> list[Command]:
    """A worker does not stand at the step that was thought: go on with what the others hold."""
    for held in state.holdings():
        held.holders.discard(event.worker)
    phase = state.phase
    if isinstance(phase, Breakable):
        return abort(state, now, reason)
    if isinstance(phase, Aborting):
        return on_lost(state, now, event.worker)
    if isinstance(phase, Saving):
        break_upload(state, state.generation, state.committed_step)
        return save_anew(state, now)
    return []


def _note_cause(phase: Aborting, failure: Ending) -> None:
    """An exception is the cause of the abort unless a worker was lost before: then it may follow
    from that. Workers that are lost after it change nothing."""
    if phase.raised is None and not phase.num_lost:
        phase.raised = failure


def on_stop_requested(state: CoreState, now: float, event: StopRequested) -> list[Command]:
    """End at the next boundary. What the workers do beside training is not waited for if they hold
    the state, nor is a worker that hangs."""
    state.ending = state.ending or Ending("interrupted", event.cause)
    phase = state.phase
    if isinstance(phase, Forming | Resharding) and living(state):
        return abort(state, now, event.cause)
    if isinstance(phase, Aborting):
        phase.deadline = max(now, next_end(state, phase))
    return []


def on_damaged(state: CoreState, now: float, event: CheckpointDamaged) -> list[Command]:
    """Go on from another holding, now and whenever the run is begun again."""
    damaged = [saved for saved in state.saved if saved.path == event.path]
    state.saved = [saved for saved in state.saved if saved.path != event.path]
    commands: list[Command] = [SetAside(saved.step, saved.generation) for saved in damaged]
    phase = state.phase
    is_read = isinstance(phase, Resharding) and phase.attempt.path == event.path
    if not is_read or event.generation != state.generation:
        return commands
    return commands + abort(state, now, event.cause)


def _reason(state: CoreState, event: WorkerRaised) -> str:
    """What is told of an exception; of too little memory also the bytes, and what would fit."""
    reason = f"{event.worker}: {event.message}"
    if event.kind != "memory":
        return reason
    shortage = Shortage(event.held_bytes, event.wanted_bytes)
    phase = state.phase
    forming = phase.attempt.assignment if isinstance(phase, Forming | Resharding) else None
    assignment = forming or (state.held.assignment if state.held else None)
    told = advice(assignment.layout, state.job, shortage) if assignment else shortage
    return f"{reason}; {told}"


def on_quiesced(state: CoreState, now: float, event: Quiesced) -> list[Command]:
    phase = state.phase
    if not isinstance(phase, Aborting) or event.generation != state.generation:
        return []
    if event.worker not in phase.pending or state.catch_up:
        return []
    if phase.rolling_forward is not None:
        return _give_up_rolling_forward(state, now, event)
    phase.pending.discard(event.worker)
    phase.suspects.discard(event.worker)  # it has answered
    phase.last_unwound_s, phase.changed_at = now - phase.began, now
    phase.reports[event.worker] = event
    commands = _learn(state, event)
    if phase.pending:
        phase.deadline = next_end(state, phase)
        return commands
    return commands + _advance(state, now, phase)


def on_rolled_forward(state: CoreState, now: float, event: RolledForward) -> list[Command]:
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


def _give_up_rolling_forward(state: CoreState, now: float, event: Quiesced) -> list[Command]:
    """Its apply of the decided step broke; an older report of the same worker says nothing."""
    if not event.torn:
        return []
    cause = "its apply of the decided step broke"
    forget(state, now, event.worker, cause)
    return [StopWorker(event.worker, cause), *on_lost(state, now, event.worker)]


def on_lost(state: CoreState, now: float, worker: str) -> list[Command]:
    """A worker died while the survivors unwind, settle or send records."""
    phase = state.phase
    assert isinstance(phase, Aborting)
    was_expected = worker in phase.pending
    phase.num_lost += was_expected or worker in phase.reports
    if was_expected:
        phase.has_lost_pending, phase.changed_at = True, now
    phase.pending.discard(worker)
    phase.reports.pop(worker, None)
    if state.catch_up:
        return catch_up.on_lost(state, now, worker)
    if phase.pending:
        phase.deadline = next_end(state, phase)
    if phase.pending or not was_expected:
        return []
    phase.rolling_forward = None
    return _advance(state, now, phase)


def on_suspected(state: CoreState, now: float, worker: str) -> list[Command]:
    """A worker that does not answer is waited for no longer than it may need."""
    phase = state.phase
    assert isinstance(phase, Aborting)
    if worker not in phase.pending:
        return []
    if state.catch_up:
        return catch_up.on_lost(state, now, worker)
    phase.suspects.add(worker)
    phase.suspected_at = now
    phase.deadline = next_end(state, phase)
    return []


def on_watched(state: CoreState, event: WorkerAnswered | WorkersStalled) -> list[Command]:
    """What is known of pending workers besides: one that answers again is no suspect any more."""
    if isinstance(event, WorkersStalled):
        if event.generation == state.generation:
            state.standing_still = event.workers
        return []
    phase = state.phase
    if isinstance(phase, Aborting) and event.worker in phase.suspects & phase.pending:
        phase.suspects.discard(event.worker)
        phase.deadline = next_end(state, phase)
    return []


def on_deadline(state: CoreState, now: float) -> list[Command]:
    """End pending workers that have had their time."""
    phase = state.phase
    assert isinstance(phase, Aborting)
    late, phase.deadline = due(state, phase, now)
    cause = "it did not unwind in time"
    commands: list[Command] = [StopWorker(worker, cause) for worker in sorted(late)]
    for worker in sorted(late):
        forget(state, now, worker, cause)
        if state.phase is phase:
            commands += on_lost(state, now, worker)
    return commands


def _advance(state: CoreState, now: float, phase: Aborting) -> list[Command]:
    """Nobody is waited for: bring the survivors to one step, then the controller, then go on."""
    torn = [w for w, report in phase.reports.items() if report.torn]
    commands = _drop(state, now, phase, torn, "an apply broke half-way")
    vote, holders = state.last_vote, state.held.holders if state.held else set()
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
    hopeless = [report.worker for report in late if report.worker not in behind]
    commands += _drop(state, now, phase, hopeless, "it cannot come to the others' step")
    if vote is not None and behind:
        # Whoever settles a step does not write a part of it.
        break_upload(state, state.generation, vote.step)
        phase.rolling_forward = vote
        phase.pending = behind
        phase.deadline = phase.patience = now + state.policy.collective_timeout_s
        return [*commands, RollForward(state.generation, tuple(sorted(behind)), vote)]
    if len(reports) > len(late) and newest_step > state.committed_step:
        return commands + catch_up.begin(state, now, newest_step)
    return commands + _go_on(state, now, phase)


def on_caught_up(state: CoreState, now: float) -> list[Command]:
    """The controller has the records of all that the survivors have committed."""
    phase = state.phase
    assert isinstance(phase, Aborting)
    phase.pending = set()
    return _advance(state, now, phase)


def _drop(
    state: CoreState, now: float, phase: Aborting, workers: list[str], cause: str
) -> list[Command]:
    """End those that cannot come to the step at which the others stand."""
    for worker in workers:
        forget(state, now, worker, cause)
        del phase.reports[worker]
    return [StopWorker(worker, cause) for worker in workers]


def _learn(state: CoreState, report: Quiesced) -> list[Command]:
    """What a holder has seen counts, also if he dies before the others have spoken."""
    if not state.held or report.worker not in state.held.holders:
        return []
    note_vote(state, report.vote)
    return record_all(state, report.records)


def _go_on(state: CoreState, now: float, phase: Aborting) -> list[Command]:
    if living(state):
        break_guard(state)
    if phase.raised:
        state.ending = state.ending or phase.raised
    elif state.committed_step >= state.job.steps and living(state) and not state.rollback:
        state.ending = state.ending or Ending("completed")
    elif to_blame := verdict(state):
        state.ending = state.ending or Ending("failed", to_blame)
    elif state.num_attempts >= state.policy.max_attempts:
        reason = f"{state.num_attempts} recoveries without a committed step: {phase.cause}"
        state.ending = state.ending or Ending("failed", reason)
    return go_on(state, now)
