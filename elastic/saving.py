"""Checkpoints: when all parts of one are durable it is published; the last one ends the run."""

from __future__ import annotations

from elastic.commands import Command, PublishCheckpoint, SaveCheckpoint, Stopped
from elastic.events import Checkpointed, PartFailed, PartWritten, Saved
from elastic.phases import Ending, Saving
from elastic.phases import Stopped as StoppedPhase
from elastic.recovery import live_covers
from elastic.state import CoreState, Upload


def upload_key(generation: int, step: int) -> str:
    return f"{generation}:{step}"


def expect_parts(state: CoreState, step: int) -> None:
    """Every member writes its part of this step by itself, without being told."""
    every = state.job.checkpoint_every
    if every and step % every == 0:
        _open_upload(state, state.generation, step, set(state.members()))


def on_part_written(state: CoreState, event: PartWritten) -> list[Command]:
    key = upload_key(event.generation, event.step)
    if key not in state.uploads and event.generation == state.generation:
        expect_parts(state, event.step)
    upload = state.uploads.get(key)
    if upload is None or event.worker not in upload.pending:
        return []
    upload.pending.discard(event.worker)
    upload.files[event.file] = event.num_bytes
    if upload.pending:
        return []
    files = tuple(sorted(upload.files.items()))
    return [PublishCheckpoint(event.step, event.generation, files)]


def on_part_failed(state: CoreState, now: float, event: PartFailed) -> list[Command]:
    state.uploads.pop(upload_key(event.generation, event.step), None)
    if isinstance(state.phase, Saving) and event.generation == state.phase.generation:
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


def end(state: CoreState, now: float) -> list[Command]:
    """Write the last checkpoint if the state is there and not saved yet; else stop."""
    if state.saved and state.saved.step >= state.committed_step:
        return stop(state)
    if not state.held or not live_covers(state):
        return stop(state, "the state is not covered by living workers: nothing to save")
    deadline = now + state.policy.save_timeout_s
    key = upload_key(state.generation, state.committed_step)
    if key in state.uploads:
        pending = state.uploads[key].pending
        state.enter(Saving(state.generation, pending, deadline))
        return []
    if isinstance(state.phase, Saving):
        # Parts of the broken attempt may still arrive: a new number tells them apart.
        state.generation += 1
    writers = set(state.held.holders)
    _open_upload(state, state.generation, state.committed_step, writers)
    state.enter(Saving(state.generation, writers, deadline))
    held_generation = state.held.assignment.generation
    workers = tuple(sorted(writers))
    return [SaveCheckpoint(state.generation, workers, state.committed_step, held_generation)]


def stop(state: CoreState, shortfall: str = "") -> list[Command]:
    """The run has ended; what could not be done for it is told beside the reason."""
    ending = state.ending or Ending("completed")
    state.enter(StoppedPhase(ending.outcome))
    reason = "; ".join(part for part in (ending.reason, shortfall) if part)
    return [Stopped(ending.outcome, state.committed_step, reason, ending.traceback)]


def _open_upload(state: CoreState, generation: int, step: int, writers: set[str]) -> None:
    state.uploads[upload_key(generation, step)] = Upload(step, generation, set(writers))
