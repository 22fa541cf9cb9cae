"""Uploads: checkpoints whose parts are being written, and those that will never be whole."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from elastic.geometry.assignment import Assignment
from elastic.protocol.commands import Command, StopWorker, Warned
from elastic.protocol.controller_state import CoreState, Upload

PATIENCE_FACTOR = 4.0
"""A part is late after so many times the longest recent write."""


def upload_key(generation: int, step: int) -> str:
    return f"{generation}:{step}"


def write_patience_s(state: CoreState) -> float:
    """How long the parts of a checkpoint may take before those that are missing are late."""
    longest_s = max(state.checkpoint_costs.writes_s, default=0.0)
    return max(state.policy.save_timeout_s, PATIENCE_FACTOR * longest_s)


def open_upload(
    state: CoreState,
    now: float,
    generation: int,
    step: int,
    writers: set[str],
    assignment: Assignment,
) -> None:
    """Expect the parts of a checkpoint from these workers."""
    deadline = now + write_patience_s(state)
    upload = Upload(step, generation, set(writers), assignment, now, deadline)
    state.uploads.setdefault(upload_key(generation, step), upload)


def break_uploads(
    state: CoreState, which: Callable[[Upload], bool] = lambda upload: True
) -> list[Upload]:
    """Give these up; what has been written of them is removed with the next that is."""
    broken = {key: upload for key, upload in state.uploads.items() if which(upload)}
    for key, upload in broken.items():
        del state.uploads[key]
        state.stale_checkpoints.append((upload.step, upload.generation))
    return list(broken.values())


def break_upload(state: CoreState, generation: int, step: int) -> bool:
    """Give this one up, if there is such a one."""
    key = upload_key(generation, step)
    if key not in state.uploads:
        return False
    broken = state.uploads[key]
    break_uploads(state, lambda upload: upload is broken)
    return True


def upload_deadline(state: CoreState) -> float:
    """When a checkpoint takes too long, if no other deadline ends the wait for it."""
    if state.ending:
        return inf
    return min((upload.deadline for upload in state.uploads.values()), default=inf)


def let_go(state: CoreState, now: float) -> list[Command]:
    """Act on each checkpoint that takes too long, and look at it again as much later."""
    if now < upload_deadline(state):
        return []
    late = [upload for upload in state.uploads.values() if now >= upload.deadline]
    commands: list[Command] = []
    for upload in late:
        upload.deadline = now + write_patience_s(state)
        if upload.is_published:
            told = "is written, but storage does not answer the controller that makes it visible"
            commands.append(_warned(state, now, upload, told))
        elif upload.pending:
            commands += _let_go_of_writers(state, now, upload)
    return commands


def note_part(state: CoreState, worker: str) -> None:
    """A part has been written, or its write has failed: this worker does not hang."""
    if worker not in state.late_writers:
        return
    state.late_writers.discard(worker)
    drain = state.node_drains.get(state.worker_records[worker].node)
    if drain:
        drain.draining_workers.add(worker)
    else:
        state.draining.discard(worker)


def _let_go_of_writers(state: CoreState, now: float, upload: Upload) -> list[Command]:
    """As far as the latest vote tells who still writes: without one a worker may be slow."""
    vote = state.last_vote
    if vote is None or vote.step <= upload.step:
        return []
    members = set(state.members())
    if not vote.num_writing and upload.pending <= members:
        told = f"is made again: {_names(state, upload)} wrote, and the reports of it were lost"
        warned = _warned(state, now, upload, told)
        break_uploads(state, lambda other: other is upload)
        state.checkpoint_costs.forget()
        state.want_save(now)
        return [warned]
    if not upload.files:
        told = (
            "has no part yet: the storage does not answer, and training goes on without newer ones"
        )
        return [_warned(state, now, upload, told)]
    told = f"is not whole: {_names(state, upload)} still writes, and is replaced"
    holders = set[str]().union(*(held.holders for held in state.holdings()))
    new = upload.pending - state.draining
    state.draining |= new
    state.late_writers |= new & (members | holders)
    idle = sorted(new - members - holders)
    cause = "it did not write its part in time"
    return [_warned(state, now, upload, told), *(StopWorker(worker, cause) for worker in idle)]


def _names(state: CoreState, upload: Upload) -> str:
    places = [
        f"{worker} on {state.worker_records[worker].node}" for worker in sorted(upload.pending)
    ]
    rest = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return ", ".join(places[:4]) + rest


def _warned(state: CoreState, now: float, upload: Upload, told: str) -> Warned:
    text = f"after {now - upload.since:.0f} s the checkpoint of step {upload.step} {told}"
    return Warned(state.generation, state.committed_step, "checkpoint", text)
