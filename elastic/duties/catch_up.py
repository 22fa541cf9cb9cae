"""Catch-up: the records of steps that committed while the controller could not hear of them.

Every member has the same records, so one worker is asked, and another if it does not answer. A
step whose record no worker has any more gets a line without numbers: it has committed, and the
step number never goes back while the tensors do not (DESIGN section 6).
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.duties.loss_monitor import commit
from elastic.protocol.commands import Command, SendRecords
from elastic.protocol.controller_state import CatchUp, CoreState
from elastic.protocol.phases import Aborting, Pausing, Running
from elastic.protocol.step_records import RecordsSent
from elastic.protocol.votes import StepRecord, Vote

NUM_SILENT_WORKERS = 4
"""After so many have not answered, nobody else is asked."""


def begin(state: CoreState, now: float, target: int) -> list[Command]:
    """Bring the controller's records up to `target`, a step that has committed."""
    if state.catch_up is not None:
        state.catch_up.target = max(state.catch_up.target, target)
        return []
    state.catch_up = CatchUp(target)
    return _ask_next(state, now)


def on_records_sent(state: CoreState, now: float, event: RecordsSent) -> list[Command]:
    """Commit the steps; ask for the rest, or ask another worker if this one has none."""
    catch_up, before = state.catch_up, state.committed_step
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
        return commands + _ask_next(state, now)
    return [*commands, _request(state, now, catch_up)]


def on_lost(state: CoreState, now: float, worker: str) -> list[Command]:
    """Ask another worker if the one that was asked is gone."""
    if state.catch_up is None or state.catch_up.worker != worker:
        return []
    return _ask_next(state, now)


def on_deadline(state: CoreState, now: float) -> list[Command]:
    """Ask another worker if the one that was asked does not answer."""
    if state.catch_up is None or now < state.catch_up.deadline:
        return []
    return _ask_next(state, now)


def repeat_request(state: CoreState, now: float) -> list[Command]:
    """What was asked for before the controller died has been sent to nobody, or will be again."""
    if state.catch_up is None or not state.catch_up.worker:
        return []
    return [_request(state, now, state.catch_up)]


def is_over(state: CoreState) -> bool:
    """Whether the controller has caught up; it forgets that it had to."""
    if state.catch_up is None or state.committed_step < state.catch_up.target:
        return False
    state.catch_up = None
    return True


def record_all(
    state: CoreState, records: Iterable[StepRecord], with_gaps: bool = False
) -> list[Command]:
    """Commit the steps that were not known yet, in order. A gap ends it, unless it is known that
    nobody can fill it: then the steps in between are marked as missing."""
    commands: list[Command] = []
    for record in records:
        if with_gaps:
            commands += mark_missing(state, now=record.time, target=record.step - 1)
        if record.step == state.committed_step + 1:
            commands += commit(state, record)
    return commands


def mark_missing(state: CoreState, now: float, target: int) -> list[Command]:
    """Commit the steps up to `target` without their numbers, which nobody has any more."""
    commands: list[Command] = []
    held = state.held
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


def note_vote(state: CoreState, vote: Vote | None) -> None:
    """Keep the newest vote that anybody has read."""
    if vote and (state.last_vote is None or vote.step > state.last_vote.step):
        state.last_vote = vote


def _ask_next(state: CoreState, now: float) -> list[Command]:
    """Ask the next holder in world-rank order; without one, nobody has the records."""
    catch_up = state.catch_up
    assert catch_up is not None
    if catch_up.worker:
        catch_up.tried = (*catch_up.tried, catch_up.worker)
    holders = state.held.holders if state.held else set()
    left = [w for w in state.members() if w in holders and w not in catch_up.tried]
    if len(holders.intersection(catch_up.tried)) >= NUM_SILENT_WORKERS:
        left = []
    phase = state.phase
    if isinstance(phase, Aborting) or (isinstance(phase, Pausing) and phase.is_whole):
        phase.pending = set(left[:1])
    if not left:
        catch_up.worker = ""
        return mark_missing(state, now, catch_up.target)
    catch_up.worker = left[0]
    return [_request(state, now, catch_up)]


def _request(state: CoreState, now: float, catch_up: CatchUp) -> Command:
    catch_up.deadline = now + state.policy.records_timeout_s
    return SendRecords(state.generation, (catch_up.worker,), state.committed_step)
