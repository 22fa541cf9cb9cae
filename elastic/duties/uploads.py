"""Uploads: checkpoints whose parts are being written, the late ones, and those that never complete.

An upload is open from the moment at which members begin to write their parts until the checkpoint
is published. It is broken if a part fails or a writer is lost; its files are then stale and removed
later. A late upload is reported or repeated, or its hanging writers are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from elastic.geometry.assignment import Assignment
from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import Upload
from elastic.protocol.notes import Warned

PATIENCE_FACTOR = 4.0
"""A part is late after this many times the longest recent write."""


def open_upload(
    state: ControllerState,
    now: float,
    generation: int,
    step: int,
    writers: set[str],
    assignment: Assignment,
) -> None:
    """Expect the parts of a checkpoint from these workers."""
    deadline = now + write_patience_s(state)
    upload = Upload(step, generation, set(writers), assignment, now, deadline)
    state.checkpoints.uploads.setdefault(upload_key(generation, step), upload)


def note_part(state: ControllerState, worker: str) -> None:
    """A part has been written, or its write has failed: this worker does not hang."""
    if worker not in state.checkpoints.late_writers:
        return
    state.checkpoints.late_writers.discard(worker)
    drain = state.membership.node_drains.get(state.membership.records[worker].node)
    if drain:
        drain.draining_workers.add(worker)
    else:
        state.membership.draining.discard(worker)


def break_upload(state: ControllerState, generation: int, step: int) -> bool:
    """Break one upload; return whether it was open."""
    key = upload_key(generation, step)
    if key not in state.checkpoints.uploads:
        return False
    broken = state.checkpoints.uploads[key]
    break_uploads(state, lambda upload: upload is broken)
    return True


def break_uploads(
    state: ControllerState, selects: Callable[[Upload], bool] = lambda upload: True
) -> list[Upload]:
    """Break the selected uploads; their files are removed with the next removal of checkpoints."""
    broken = {key: upload for key, upload in state.checkpoints.uploads.items() if selects(upload)}
    for key, upload in broken.items():
        del state.checkpoints.uploads[key]
        state.checkpoints.stale.append((upload.step, upload.generation))
    return list(broken.values())


def lose_uploads(state: ControllerState, now: float, selects: Callable[[Upload], bool]) -> None:
    """Break the selected uploads, and request another checkpoint in their place: else the next one
    would come a full interval after the lost one."""
    if break_uploads(state, selects):
        state.checkpoints.want_save(now)


def upload_deadline(state: ControllerState) -> float:
    """When the next upload is late, if no other deadline ends the wait for it."""
    if state.ending:
        return inf
    return min((upload.deadline for upload in state.checkpoints.uploads.values()), default=inf)


def handle_late_uploads(state: ControllerState, now: float) -> list[Command]:
    """Act on each late upload, and check it again after the same time."""
    if now < upload_deadline(state):
        return []
    late = [upload for upload in state.checkpoints.uploads.values() if now >= upload.deadline]
    commands: list[Command] = []
    for upload in late:
        upload.deadline = now + write_patience_s(state)
        if upload.is_published:
            problem = "is written, but the storage does not answer: it is not published yet"
            commands.append(_warned(state, now, upload, problem))
        elif upload.pending:
            commands += _handle_late_parts(state, now, upload)
    return commands


def _handle_late_parts(state: ControllerState, now: float, upload: Upload) -> list[Command]:
    """Repeat the upload, warn, or replace the writers: the latest vote says whether any member
    still writes. Without such a vote a worker may just be slow."""
    vote = state.steps.last_vote
    if vote is None or vote.step <= upload.step:
        return []
    members = set(state.live.members())
    if not vote.num_writing and upload.pending <= members:
        problem = f"is repeated: the reports of {_names(state, upload)} were lost"
        warning = _warned(state, now, upload, problem)
        break_uploads(state, lambda other: other is upload)
        state.checkpoints.costs.forget()
        state.checkpoints.want_save(now)
        return [warning]
    if not upload.files:
        problem = "has no part yet: the storage does not answer; training continues without it"
        return [_warned(state, now, upload, problem)]
    late_writers = _names(state, upload)
    problem = f"is incomplete: {late_writers} did not finish writing; each is replaced"
    holders = set[str]().union(*(held.holders for held in state.live.holdings()))
    newly_late = upload.pending - state.membership.draining
    state.membership.draining |= newly_late
    state.checkpoints.late_writers |= newly_late & (members | holders)
    idle = sorted(newly_late - members - holders)
    cause = "it did not write its part in time"
    return [_warned(state, now, upload, problem), *(StopWorker(worker, cause) for worker in idle)]


def upload_key(generation: int, step: int) -> str:
    """The key of an upload in the state."""
    return f"{generation}:{step}"


def write_patience_s(state: ControllerState) -> float:
    """How long the parts of a checkpoint may take before missing ones are late."""
    longest_s = max(state.checkpoints.costs.writes_s, default=0.0)
    return max(state.policy.save_timeout_s, PATIENCE_FACTOR * longest_s)


def _names(state: ControllerState, upload: Upload) -> str:
    """Up to four pending writers with their nodes, and the number of the others."""
    writers = [
        f"{worker} on {state.membership.records[worker].node}" for worker in sorted(upload.pending)
    ]
    rest = f" and {len(writers) - 4} more" if len(writers) > 4 else ""
    return ", ".join(writers[:4]) + rest


def _warned(state: ControllerState, now: float, upload: Upload, problem: str) -> Warned:
    text = f"after {now - upload.since:.0f} s the checkpoint of step {upload.step} {problem}"
    return Warned(state.generation, state.committed_step, "checkpoint", text)
