"""Catch-up: records of steps that committed while the controller could not receive reports.

Every member has the same records, so the controller requests them from one worker, and from another
if that one does not answer. If no worker has the record of a step any more, the step gets a line
without numbers: it has committed, and the step number never goes back while the tensors do not
(invariant 8).
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.duties.loss_monitor import commit
from elastic.protocol.commands import Command, SendRecords
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import CatchUp
from elastic.protocol.phases import Aborting, Pausing, Running
from elastic.protocol.step_records import RecordsSent
from elastic.protocol.votes import StepRecord, Vote

NUM_SILENT_WORKERS = 4
"""After this many workers have not answered, no other worker is queried."""


def begin(state: ControllerState, now: float, target: int) -> list[Command]:
    """Bring the controller's records up to `target`, a step that has committed."""
    if state.steps.catch_up is not None:
        state.steps.catch_up.target = max(state.steps.catch_up.target, target)
        return []
    state.steps.catch_up = CatchUp(target)
    return _query_next(state, now)


def on_records_sent(state: ControllerState, now: float, event: RecordsSent) -> list[Command]:
    """Commit the steps; request the rest, or query another worker if this one has none."""
    catch_up, before = state.steps.catch_up, state.committed_step
    if catch_up is None or event.generation != state.generation:
        return []
    note_vote(state, event.vote)
    commands = record_all(state, event.records[:1], with_gaps=True)
    commands += record_all(state, event.records[1:])
    if isinstance(state.phase, Running):
        state.phase.num_commits += state.committed_step - before
    if event.worker != catch_up.worker or state.committed_step >= catch_up.target:
        return commands
    if state.committed_step == before:
        return commands + _query_next(state, now)
    return [*commands, _request(state, now, catch_up)]


def on_lost(state: ControllerState, now: float, worker: str) -> list[Command]:
    """Query another worker if the queried one is gone."""
    if state.steps.catch_up is None or state.steps.catch_up.worker != worker:
        return []
    return _query_next(state, now)


def on_deadline(state: ControllerState, now: float) -> list[Command]:
    """Query another worker if the queried one does not answer."""
    if state.steps.catch_up is None or now < state.steps.catch_up.deadline:
        return []
    return _query_next(state, now)


def repeat_request(state: ControllerState, now: float) -> list[Command]:
    """After a restart, repeat the pending request: the former controller may not have sent it."""
    if state.steps.catch_up is None or not state.steps.catch_up.worker:
        return []
    return [_request(state, now, state.steps.catch_up)]


def is_over(state: ControllerState) -> bool:
    """Whether the controller has caught up; if so, the catch-up is cleared."""
    if state.steps.catch_up is None or state.committed_step < state.steps.catch_up.target:
        return False
    state.steps.catch_up = None
    return True


def record_all(
    state: ControllerState, records: Iterable[StepRecord], with_gaps: bool = False
) -> list[Command]:
    """Commit the steps that are new, in order, up to the first gap.

    With `with_gaps`, no worker has the records in a gap: its steps are marked as missing.
    """
    commands: list[Command] = []
    for record in records:
        if with_gaps:
            commands += mark_missing(state, now=record.time, target=record.step - 1)
        if record.step == state.committed_step + 1:
            commands += commit(state, record)
    return commands


def mark_missing(state: ControllerState, now: float, target: int) -> list[Command]:
    """Commit the steps up to `target` without numbers, since no worker has them any more."""
    commands: list[Command] = []
    held = state.live.held
    world_size = held.assignment.layout.num_workers if held else 0
    generation = held.assignment.generation if held else state.generation
    for step in range(state.committed_step + 1, target + 1):
        record = StepRecord(
            time=now,
            step=step,
            generation=generation,
            world_size=world_size,
            loss=None,
            tokens=None,
            lr=None,
            grad_norm=None,
            step_s=None,
            skipped=False,
            missing=True,
        )
        commands += commit(state, record)
    return commands


def note_vote(state: ControllerState, vote: Vote | None) -> None:
    """Keep the newest vote that any worker has read."""
    if vote and (state.steps.last_vote is None or vote.step > state.steps.last_vote.step):
        state.steps.last_vote = vote


def _query_next(state: ControllerState, now: float) -> list[Command]:
    """Query the next holder in world-rank order; if none is left, the records are lost."""
    catch_up = state.steps.catch_up
    assert catch_up is not None
    if catch_up.worker:
        catch_up.tried = (*catch_up.tried, catch_up.worker)
    holders = state.live.held.holders if state.live.held else set()
    candidates = [w for w in state.live.members() if w in holders and w not in catch_up.tried]
    if len(holders.intersection(catch_up.tried)) >= NUM_SILENT_WORKERS:
        candidates = []
    phase = state.phase
    if isinstance(phase, Aborting) or (isinstance(phase, Pausing) and phase.is_whole):
        phase.pending = set(candidates[:1])
    if not candidates:
        catch_up.worker = ""
        return mark_missing(state, now, catch_up.target)
    catch_up.worker = candidates[0]
    return [_request(state, now, catch_up)]


def _request(state: ControllerState, now: float, catch_up: CatchUp) -> Command:
    catch_up.deadline = now + state.policy.records_timeout_s
    return SendRecords(state.generation, (catch_up.worker,), state.committed_step)
