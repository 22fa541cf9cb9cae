"""Late writers: a write that never returns must not end all checkpoints of a run.

A checkpoint is whole once every worker has written its part, and no other is begun before that. A
part is late after `save_timeout_s`, or four times as long as the longest recent checkpoint took.
Nothing can free the thread that writes it, so its worker leaves the run at a step boundary: it
still trains, and gives its part of the state to the others. Its end breaks the checkpoint, and
another is made at once.

Where the run cannot train without it, it trains on until another worker has come. Where no worker
has written anything the storage does not answer, and another worker would hang as well: then
training goes on, and a warning is repeated for as long as that lasts.
"""

from __future__ import annotations

from math import inf

from elastic.commands import Command, StopWorker, Warned
from elastic.state import CoreState, Upload
from elastic.uploads import break_uploads, write_patience_s


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
    drain = state.draining.get(state.seats[worker].node)
    if drain:
        drain.leavers.add(worker)
    else:
        state.leaving.discard(worker)


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
    new = upload.pending - state.leaving
    state.leaving |= new
    state.late_writers |= new & (members | holders)
    idle = sorted(new - members - holders)
    cause = "it did not write its part in time"
    return [_warned(state, now, upload, told), *(StopWorker(worker, cause) for worker in idle)]


def _names(state: CoreState, upload: Upload) -> str:
    places = [f"{worker} on {state.seats[worker].node}" for worker in sorted(upload.pending)]
    rest = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return ", ".join(places[:4]) + rest


def _warned(state: CoreState, now: float, upload: Upload, told: str) -> Warned:
    text = f"after {now - upload.since:.0f} s the checkpoint of step {upload.step} {told}"
    return Warned(state.generation, state.committed_step, "checkpoint", text)
