"""Checkpoints: when all parts of one are durable it is published; the last one ends the run."""

from __future__ import annotations

from elastic.commands import Command, PublishCheckpoint, SaveCheckpoint, Stopped, StopWorker
from elastic.events import Checkpointed, PartFailed, PartWritten, Saved
from elastic.phases import Ending, Pausing, Running, Saving
from elastic.phases import Stopped as StoppedPhase
from elastic.recovery import INITIAL_STEP, living
from elastic.roster import forget
from elastic.state import CoreState, Held, Upload


def upload_key(generation: int, step: int) -> str:
    return f"{generation}:{step}"


def expect_parts(state: CoreState, step: int) -> None:
    """Every member writes its part of this step by itself, without being told.

    Not once the generation is broken off: then nobody knows who still writes.
    """
    every = state.job.checkpoint_every
    if every and step % every == 0 and isinstance(state.phase, Running | Pausing):
        _open_upload(state, state.generation, step, set(state.members()))


def on_part_written(state: CoreState, event: PartWritten) -> None:
    if event.generation == state.generation:
        expect_parts(state, event.step)  # a part may overtake the report of its step
    upload = state.uploads.get(upload_key(event.generation, event.step))
    if upload and event.worker in upload.pending:
        upload.pending.discard(event.worker)
        upload.files[event.file] = event.num_bytes


def publish_whole(state: CoreState) -> list[Command]:
    """Make visible what is whole; a step whose report is still to come is not known to stand."""
    commands: list[Command] = []
    for upload in state.uploads.values():
        known = upload.step <= state.committed_step
        if known and not upload.pending and not upload.is_published:
            upload.is_published = True
            files = tuple(sorted(upload.files.items()))
            commands.append(PublishCheckpoint(upload.step, upload.generation, files))
    return commands


def on_part_failed(state: CoreState, now: float, event: PartFailed) -> list[Command]:
    state.uploads.pop(upload_key(event.generation, event.step), None)
    phase = state.phase
    is_last = isinstance(phase, Saving) and event.generation == phase.generation
    if is_last and event.step == state.committed_step:
        return stop(state, f"the last checkpoint could not be written: {event.cause}")
    return []


def on_checkpointed(state: CoreState, event: Checkpointed) -> list[Command]:
    if state.saved is None or event.step >= state.saved.step:
        state.saved = Saved(event.step, event.generation, event.path)
    for key in [k for k, upload in state.uploads.items() if upload.step <= event.step]:
        del state.uploads[key]
    if isinstance(state.phase, Saving) and event.step == state.committed_step:
        return stop(state)
    return []


def is_saved(state: CoreState) -> bool:
    """Whether there is nothing newer than what lasts."""
    return state.committed_step <= (state.saved.step if state.saved else INITIAL_STEP)


def end(state: CoreState, now: float) -> list[Command]:
    """Write the last checkpoint if the state is there and not saved yet; else stop.

    The initial state can always be made again.
    """
    if is_saved(state):
        return stop(state)
    held = living(state)
    if held is None:
        return stop(state, "the state is not covered by living workers: nothing to save")
    others = [other for other in state.holdings() if other is not held]
    state.held, state.also_held = held, next(iter(others), None)
    commands: list[Command] = []
    if upload_key(state.generation, state.committed_step) not in state.uploads:
        commands = [_order_parts(state, held)]
    state.enter(Saving(state.generation, now + state.policy.save_timeout_s))
    return commands


def on_deadline(state: CoreState, now: float) -> list[Command]:
    """End writers that are late, if the others have all of the state; else give up."""
    upload = state.uploads.get(upload_key(state.generation, state.committed_step))
    late = sorted(upload.pending) if upload else []
    if not late or not living(state, without=set(late)):
        return stop(state, "the last checkpoint took too long")
    cause = "it did not write its part in time"
    for worker in late:
        forget(state, now, worker, cause)
    return [*(StopWorker(worker, cause) for worker in late), *end(state, now)]


def stop(state: CoreState, shortfall: str = "") -> list[Command]:
    """The run has ended; what could not be done for it is told beside the reason.

    A run that is not saved is not complete: begun again, it goes on from what is.
    """
    ending = state.ending or Ending("completed")
    outcome = "failed" if shortfall and ending.outcome == "completed" else ending.outcome
    state.enter(StoppedPhase(outcome))
    reason = "; ".join(part for part in (ending.reason, shortfall) if part)
    return [Stopped(outcome, state.committed_step, reason, ending.traceback)]


def _order_parts(state: CoreState, held: Held) -> SaveCheckpoint:
    """Parts of a broken attempt at this step may still arrive: a new number tells them apart."""
    state.generation += 1
    step, workers = state.committed_step, tuple(sorted(held.holders))
    _open_upload(state, state.generation, step, held.holders)
    return SaveCheckpoint(state.generation, workers, step, held.assignment.generation)


def _open_upload(state: CoreState, generation: int, step: int, writers: set[str]) -> None:
    key = upload_key(generation, step)
    state.uploads.setdefault(key, Upload(step, generation, set(writers)))
