"""Uploads: checkpoints whose parts are being written, the late ones, and those that never complete.

An upload is open from the moment at which members begin to write their parts until the checkpoint
is published. It is broken if a part fails or a writer is lost; its files are then removed,
and again once no worker writes a part of it. A late upload is reported or repeated, or its hanging
writers are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from math import inf

from elastic.geometry.assignment import Assignment
from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import Upload
from elastic.protocol.notes import Warned

PATIENCE_FACTOR = 4.0
"""A part is late after this many times the longest recent write."""
FEW_LATE = 0.05
"""Late writers up to this share of all, or those of one node, are replaced at once: more of them
show that the storage is slow."""


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


def note_part(state: ControllerState, worker: str, key: str) -> None:
    """A part of this upload has been written, or could not be: this worker does not hang."""
    state.checkpoints.unfinished.get(key, set()).discard(worker)
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
        abandon(state, upload.step, upload.generation, upload.pending)
        state.checkpoints.costs.note_partial_write(upload.written_s)
    return list(broken.values())


def lose_uploads(state: ControllerState, now: float, selects: Callable[[Upload], bool]) -> None:
    """Break the selected uploads, and request another checkpoint in their place: else the next one
    would come a full interval after the lost one."""
    if break_uploads(state, selects):
        state.checkpoints.want_save(now)


def abandon(state: ControllerState, step: int, generation: int, writers: Set[str]) -> None:
    """Remove the files of a checkpoint that will never be complete, and again once each of these
    workers has ended its write: its part may appear after the first removal."""
    state.checkpoints.stale.append((step, generation))
    if writers:
        state.checkpoints.unfinished[upload_key(generation, step)] = set(writers)


def end_older_parts(state: ControllerState, complete: Upload) -> None:
    """The writers of a complete checkpoint have ended their parts of older ones, in this order; the
    reports may be lost."""
    for key, writers in state.checkpoints.unfinished.items():
        if _position(key) < (complete.generation, complete.step):
            writers.difference_update(complete.assignment.members)


def take_finished(state: ControllerState) -> set[tuple[int, int]]:
    """Step and generation of abandoned checkpoints that no worker writes a part of any more."""
    workers, unfinished = state.membership.records.keys(), state.checkpoints.unfinished
    finished = [key for key, writers in unfinished.items() if writers.isdisjoint(workers)]
    for key in finished:
        del unfinished[key]
    return {(step, generation) for generation, step in map(_position, finished)}


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
    if not _do_writers_hang(state, upload):
        problem = f"is incomplete: {late_writers} still write; training continues without it"
        return [_warned(state, now, upload, problem)]
    problem = f"is incomplete: {late_writers} did not finish writing; each is replaced"
    holders = set[str]().union(*(held.holders for held in state.live.holdings()))
    newly_late = upload.pending - state.membership.draining
    state.membership.draining |= newly_late
    state.checkpoints.late_writers |= newly_late & (members | holders)
    idle = sorted(newly_late - members - holders)
    cause = "it did not write its part in time"
    return [_warned(state, now, upload, problem), *(StopWorker(worker, cause) for worker in idle)]


def _do_writers_hang(state: ControllerState, upload: Upload) -> bool:
    """Whether the late writers hang, rather than the storage being slow for many: they are few, or
    a minority of which none has finished since the last look."""
    num_late, num_all = len(upload.pending), len(upload.assignment.members)
    num_before, upload.num_files_when_late = upload.num_files_when_late, len(upload.files)
    if num_late <= max(1, int(FEW_LATE * num_all)) or _are_of_one_node(state, upload):
        return True
    return len(upload.files) == num_before and 2 * num_late <= num_all


def _are_of_one_node(state: ControllerState, upload: Upload) -> bool:
    """Whether only one of several nodes has late writers."""
    records, late = state.membership.records, upload.pending
    others = [m for m in upload.assignment.members if m in records and m not in late]
    nodes = {records[worker].node for worker in late}
    return len(nodes) == 1 and any(records[worker].node not in nodes for worker in others)


def upload_key(generation: int, step: int) -> str:
    """The key of an upload in the state."""
    return f"{generation}:{step}"


def _position(key: str) -> tuple[int, int]:
    """Generation and step of an `upload_key`: workers write their parts in this order."""
    generation, _, step = key.partition(":")
    return int(generation), int(step)


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
