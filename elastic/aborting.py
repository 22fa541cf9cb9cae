"""Aborting: unwind the survivors, then bring all of them to one step.

A vote that anybody has seen decides its step, be he alive or dead: every survivor rolls forward
to it (DESIGN section 6). If nobody has seen it, the gradients are dropped and the step is redone.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.blaming import verdict
from elastic.commands import Abort, Command, SetAside, Settle, StopWorker
from elastic.events import CheckpointDamaged, Quiesced, Settled, WorkerRaised
from elastic.fitting import Shortage, advice
from elastic.forming import go_on
from elastic.judging import commit
from elastic.phases import Aborting, Breakable, Ending, Forming, Relaying, Saving
from elastic.protecting import is_protected
from elastic.recovery import living
from elastic.roster import forget, participants, turn_away_unfit
from elastic.saving import stop
from elastic.state import CoreState, Held
from elastic.uploads import break_upload
from elastic.votes import StepRecord


def abort(
    state: CoreState, now: float, cause: str, num_lost: int = 0, is_hang: bool = False
) -> list[Command]:
    """Break off the generation; its survivors unwind."""
    pending = participants(state)
    policy, broken = state.policy, state.phase
    state.num_attempts += 1
    state.last_failure = cause
    state.paused_at = None
    phase = Aborting(
        cause,
        pending,
        deadline=now + max(policy.quiesce_deadline_s, state.median_step_s()),
        patience=now + policy.collective_timeout_s,
        num_lost=num_lost,
    )
    if isinstance(broken, Relaying):
        assignment = broken.attempt.assignment
        state.also_held = Held(assignment, broken.ready.keys() & set(assignment.members) & pending)
    state.enter(phase)
    if not pending:
        return _conclude(state, now, phase)
    return [Abort(state.generation, tuple(sorted(pending)), cause, is_hang)]


def on_raised(state: CoreState, now: float, event: WorkerRaised) -> list[Command]:
    """Sort an exception: a peer's death, a broken device, too little memory, a machine that lacks
    something, or a bug."""
    failure = Ending("failed", _reason(state, event), event.traceback)
    if event.worker not in state.seats:
        return []
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
    elif isinstance(state.phase, Saving) and event.generation == state.generation:
        return stop(state, f"the last checkpoint could not be written: {failure.reason}")
    if event.generation != state.generation or not isinstance(state.phase, Breakable):
        return commands  # collateral of an abort
    commands += abort(state, now, failure.reason)
    if event.kind in ("memory", "program") and isinstance(state.phase, Aborting):
        state.phase.raised = failure
    return commands


def on_damaged(state: CoreState, now: float, event: CheckpointDamaged) -> list[Command]:
    """Go on from another holding, now and whenever the run is begun again."""
    damaged = [saved for saved in state.saved if saved.path == event.path]
    state.saved = [saved for saved in state.saved if saved.path != event.path]
    commands: list[Command] = [SetAside(saved.step, saved.generation) for saved in damaged]
    phase = state.phase
    is_read = isinstance(phase, Relaying) and phase.attempt.path == event.path
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
    forming = phase.attempt.assignment if isinstance(phase, Forming | Relaying) else None
    assignment = forming or (state.held.assignment if state.held else None)
    told = advice(assignment.layout, state.job, shortage) if assignment else shortage
    return f"{reason}; {told}"


def on_quiesced(state: CoreState, now: float, event: Quiesced) -> list[Command]:
    phase = state.phase
    if not isinstance(phase, Aborting) or event.generation != state.generation:
        return []
    if event.worker not in phase.pending:
        return []
    if phase.settling is not None:
        return _give_up_settling(state, now, event)
    phase.pending.discard(event.worker)
    phase.reports[event.worker] = event
    commands = _learn(state, event)
    return commands if phase.pending else commands + _conclude(state, now, phase)


def on_settled(state: CoreState, now: float, event: Settled) -> list[Command]:
    phase = state.phase
    if not isinstance(phase, Aborting) or event.generation != state.generation:
        return []
    if phase.settling is None:
        return []
    phase.pending.discard(event.worker)
    commands = _record(state, (event.record,))
    return commands if phase.pending else commands + _go_on(state, now, phase)


def _give_up_settling(state: CoreState, now: float, event: Quiesced) -> list[Command]:
    """Its apply of the decided step broke; an older report of the same worker says nothing."""
    if not event.torn:
        return []
    cause = "its apply of the decided step broke"
    forget(state, now, event.worker, cause)
    return [StopWorker(event.worker, cause), *on_lost(state, now, event.worker)]


def on_lost(state: CoreState, now: float, worker: str) -> list[Command]:
    """A worker died while the survivors unwind or settle."""
    phase = state.phase
    assert isinstance(phase, Aborting)
    was_expected = worker in phase.pending
    phase.num_lost += was_expected or worker in phase.reports
    phase.pending.discard(worker)
    phase.reports.pop(worker, None)
    if phase.pending or not was_expected:
        return []
    return _go_on(state, now, phase) if phase.settling else _conclude(state, now, phase)


def on_deadline(state: CoreState, now: float) -> list[Command]:
    """Kill whoever has not unwound, unless he has what neither the others nor keepers have."""
    phase = state.phase
    assert isinstance(phase, Aborting)
    late = sorted(phase.pending)
    needed = living(state) and not living(state, without=phase.pending)
    if needed and not is_protected(state) and now < phase.patience:
        phase.deadline = phase.patience
        return []
    phase.deadline = phase.patience = float("inf")
    commands: list[Command] = [StopWorker(w, "it did not unwind in time") for w in late]
    for worker in late:
        forget(state, now, worker, "it did not unwind in time")
        commands += on_lost(state, now, worker)
    return commands


def _conclude(state: CoreState, now: float, phase: Aborting) -> list[Command]:
    """All reports are in: go to the newest step that anybody saw decided."""
    torn = [w for w, report in phase.reports.items() if report.torn]
    commands = _drop(state, now, phase, torn, "an apply broke half-way")
    vote = state.last_vote
    holders = state.held.holders if state.held else set()
    reports = [phase.reports[w] for w in sorted(phase.reports) if w in holders]
    late = [report for report in reports if vote and report.committed_step < vote.step]
    hopeless = [report.worker for report in late if not report.gradients_complete]
    commands += _drop(state, now, phase, hopeless, "its gradients were lost")
    behind = {report.worker for report in late if report.gradients_complete}
    if vote is None or not behind:
        return commands + _go_on(state, now, phase)
    # Whoever settles a step does not write a part of it.
    break_upload(state, state.generation, vote.step)
    phase.settling = vote
    phase.pending = behind
    phase.deadline = phase.patience = now + state.policy.collective_timeout_s
    return [*commands, Settle(state.generation, tuple(sorted(behind)), vote)]


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
    if report.vote and (state.last_vote is None or report.vote.step > state.last_vote.step):
        state.last_vote = report.vote
    return _record(state, report.records)


def _record(state: CoreState, records: Iterable[StepRecord]) -> list[Command]:
    """The lines of steps that no report had told of yet, in order and without a gap."""
    commands: list[Command] = []
    for record in records:
        if record.step == state.committed_step + 1:
            commands += commit(state, record)
    return commands


def _go_on(state: CoreState, now: float, phase: Aborting) -> list[Command]:
    if phase.raised and not phase.num_lost:
        state.ending = state.ending or phase.raised
    elif state.committed_step >= state.job.steps and living(state) and not state.rewind:
        state.ending = state.ending or Ending("completed")
    elif to_blame := verdict(state):
        state.ending = state.ending or Ending("failed", to_blame)
    elif state.num_attempts >= state.policy.max_attempts:
        reason = f"{state.num_attempts} recoveries without a committed step: {phase.cause}"
        state.ending = state.ending or Ending("failed", reason)
    return go_on(state, now)
