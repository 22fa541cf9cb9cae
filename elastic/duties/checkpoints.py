"""Checkpoints: when one is wanted, when it is whole, which are kept; the last one ends the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from elastic.duties.membership import forget
from elastic.duties.recovery import living
from elastic.duties.uploads import break_upload, break_uploads, note_part, open_upload, upload_key
from elastic.protocol.commands import (
    Command,
    DropCheckpoints,
    PublishCheckpoint,
    RequestCheckpoint,
    SaveCheckpoint,
    Stopped,
    StopWorker,
)
from elastic.protocol.controller_events import CheckpointsRemoved
from elastic.protocol.controller_state import CoreState, HeldState
from elastic.protocol.events import Checkpointed, Evaluated, PartFailed, PartWritten, Saved
from elastic.protocol.phases import Ended as StoppedPhase
from elastic.protocol.phases import Ending, Pausing, Running, Saving
from elastic.protocol.policy import Policy, backoff_s
from elastic.protocol.votes import Vote

MAX_KNOWN = 128
"""Of checkpoints that are never removed the core knows so many."""


def kept(steps: Sequence[int], losses: Mapping[int, float], policy: Policy) -> set[int]:
    """Of these saved steps, those to keep: the newest, those of each multiple, and the best by the
    held-out `losses` (by step, as far as known; of equal ones the newer step)."""
    if not policy.keep_last:
        return set(steps)
    found = set(sorted(steps)[-policy.keep_last :])
    if policy.keep_every:
        found.update(step for step in steps if step % policy.keep_every == 0)
    measured = sorted((losses[step], -step) for step in steps if step in losses)
    return found.union(-negative for _, negative in measured[: policy.keep_best])


def known(steps: Sequence[int], policy: Policy) -> set[int]:
    """Of these saved steps (ascending), those that the core remembers: of what is never removed all
    newer ones, and the fewer the older. A resumed run finds all of them in storage."""
    never_removed = [
        step
        for step in steps
        if not policy.keep_last or (policy.keep_every and step % policy.keep_every == 0)
    ]
    found = set(steps)
    while len(never_removed) > MAX_KNOWN:
        forgotten = never_removed[1 : MAX_KNOWN // 2 : 2]
        found.difference_update(forgotten)
        never_removed = [step for step in never_removed if step in found]
    return found


MAX_BACKOFF_S = 300.0

LAST_MAX_BACKOFF_S = 10.0
"""The longest pause between the tries of the last checkpoint, for which the run waits."""


def begin_saving(state: CoreState, now: float) -> None:
    """A generation trains: nobody has told its members of a wish. What was due and has been lost
    is wanted at once."""
    state.is_save_requested = False
    state.checkpoint_costs.forget()
    every, every_s = state.job.checkpoint_every, interval_s(state)
    if every and state.committed_step // every * every > state.saved_step and not state.uploads:
        state.want_save(now)
    elif every_s and state.save_at is None:
        state.save_at = now + every_s
    elif state.policy.checkpoint_auto and state.save_at is not None:
        state.save_at = min(state.save_at, now + every_s)  # failures may have made it shorter


def interval_s(state: CoreState) -> float:
    """The time from one checkpoint to the next; 0 if none is made by time."""
    policy = state.policy
    if not policy.checkpoint_auto:
        return policy.checkpoint_every_s
    return state.checkpoint_costs.interval_s(policy.checkpoint_least_s, policy.checkpoint_most_s)


def is_saving(state: CoreState) -> bool:
    """Whether this run makes checkpoints while it trains."""
    return state.job.checkpoint_every > 0 or interval_s(state) > 0.0


def expect_parts(state: CoreState, now: float, vote: Vote) -> None:
    """By this vote every member writes its part of the step by itself, without being told.

    Not once the generation is broken off: then nobody knows who still writes, unless a part was
    told of before.
    """
    is_guarded = vote.step + 1 == state.guarded_step and not vote.num_pause_requests
    saves = vote.saves(state.job.checkpoint_every) or is_guarded
    if not isinstance(state.phase, Running | Pausing):
        if saves and upload_key(state.generation, vote.step) not in state.uploads:
            state.stale_checkpoints.append((vote.step, state.generation))
    elif saves:
        _open(state, now, vote.step)
    elif vote.is_save_due(state.job.checkpoint_every):
        state.want_save(now)


def request_save(state: CoreState, now: float) -> list[Command]:
    """Have the members save at the next boundary, if it is time to. What is left of attempts that
    failed is removed before: on a full disk it may take the very space that is lacking."""
    if now < save_request_deadline(state):
        return []
    state.is_save_requested = True
    return [
        *drop_broken(state),
        RequestCheckpoint(state.generation, state.members(), state.committed_step),
    ]


def save_request_deadline(state: CoreState) -> float:
    """When to wish for a checkpoint, if at all: one at a time."""
    if state.save_at is None or state.is_save_requested or state.uploads or state.ending:
        return inf
    return state.save_at


def on_part_written(state: CoreState, now: float, event: PartWritten) -> None:
    _expect_early(state, now, event)
    note_part(state, event.worker)
    upload = state.uploads.get(upload_key(event.generation, event.step))
    if upload and event.worker in upload.pending:
        upload.pending.discard(event.worker)
        upload.files[event.file.name] = event.file
        if not upload.pending:
            state.checkpoint_costs.note_write(now - upload.since)


def publish_whole(state: CoreState) -> list[Command]:
    """Make visible what is whole; a step whose report is still to come is not known to stand."""
    commands: list[Command] = []
    for upload in state.uploads.values():
        known = upload.step <= state.committed_step
        if known and not upload.pending and not upload.is_published:
            upload.is_published = True
            files = tuple(upload.files[name] for name in sorted(upload.files))
            layout, members = upload.assignment.layout, upload.assignment.members
            commands.append(
                PublishCheckpoint(upload.step, upload.generation, files, layout, members)
            )
    return commands


def on_part_failed(state: CoreState, now: float, event: PartFailed) -> list[Command]:
    """Try again later; what is whole stays until there is something newer."""
    _expect_early(state, now, event)
    note_part(state, event.worker)
    if not break_upload(state, event.generation, event.step):
        return []  # another part of it has failed before
    state.num_save_failures += 1
    first_s, num_failures = state.policy.save_backoff_s, state.num_save_failures
    phase = state.phase
    is_last = isinstance(phase, Saving) and event.step == state.committed_step
    longest_s = LAST_MAX_BACKOFF_S if is_last else MAX_BACKOFF_S
    retry_at = now + backoff_s(first_s, num_failures, longest_s)
    state.save_at = retry_at
    if isinstance(phase, Saving) and is_last:
        if retry_at >= phase.deadline:
            return stop(state, f"the last checkpoint could not be written: {event.cause}")
        phase.retry_at = retry_at
    return []


def on_stored(state: CoreState, event: Checkpointed | CheckpointsRemoved) -> list[Command]:
    """A checkpoint has become visible. Removals are counted where the journal is written."""
    if isinstance(event, CheckpointsRemoved):
        return []
    saved = Saved(event.step, event.generation, event.path)
    state.uploads.pop(upload_key(event.generation, event.step), None)
    if not state.stands(saved.step, saved.generation):
        state.stale_checkpoints.append((saved.step, saved.generation))
        return []
    state.saved = sorted({*state.saved, saved}, key=lambda s: (s.step, s.generation))
    break_uploads(state, lambda upload: upload.step <= event.step and not upload.is_published)
    state.num_save_failures = 0
    if event.step > state.committed_step:
        return drop_voided(state)
    commands = _retain(state)
    if isinstance(state.phase, Saving) and event.step == state.committed_step:
        return [*commands, *stop(state)]
    return commands


def note_loss(state: CoreState, event: Evaluated) -> None:
    """The held-out loss of a step that is saved, or is being saved. Without a finite loss a
    checkpoint is never among the best."""
    if event.loss is None:
        state.held_out_losses.pop(str(event.step), None)
        return
    state.held_out_losses[str(event.step)] = event.loss
    steps = {s.step for s in state.saved} | {u.step for u in state.uploads.values()}
    steps.add(state.committed_step)  # its report may come after this
    losses = state.held_out_losses.items()
    state.held_out_losses = {step: loss for step, loss in losses if int(step) in steps}


def drop_voided(state: CoreState) -> list[Command]:
    """Checkpoints of steps that have been fallen back behind."""
    losses = state.held_out_losses.items()
    state.held_out_losses = {s: loss for s, loss in losses if int(s) <= state.committed_step}
    void = [saved for saved in state.saved if saved.step > state.committed_step]
    state.saved = [saved for saved in state.saved if saved.step <= state.committed_step]
    return _drop(state, void)


def drop_broken(state: CoreState) -> list[Command]:
    """What is left of uploads that broke."""
    return _drop(state, [])


def is_saved(state: CoreState) -> bool:
    """Whether there is nothing newer than what lasts."""
    return state.committed_step <= state.saved_step


def end(state: CoreState, now: float) -> list[Command]:
    """Write the last checkpoint if the state is there and not saved yet; else stop.

    The initial state can always be made again.
    """
    if is_saved(state):
        return stop(state)
    held = living(state)
    if held is None:
        return stop(state, "the state is not covered by living workers: nothing to save")
    state.also_held = [other for other in state.holdings() if other is not held]
    state.held = held
    commands: list[Command] = []
    if upload_key(state.generation, state.committed_step) not in state.uploads:
        commands = [*drop_broken(state), _order_parts(state, now, held)]
    phase = state.phase
    deadline = phase.deadline if isinstance(phase, Saving) else now + state.policy.save_timeout_s
    state.enter(Saving(state.generation, deadline))
    return commands


def on_deadline(state: CoreState, now: float) -> list[Command]:
    """Try again what has failed, or end writers that are late, if the others have all of the
    state; else give up."""
    phase = state.phase
    assert isinstance(phase, Saving)
    if phase.retry_at is not None:
        return end(state, now) if now >= phase.retry_at else []
    upload = state.uploads.get(upload_key(state.generation, state.committed_step))
    late = sorted(upload.pending) if upload else []
    if not late or not living(state, without=set(late)):
        return stop(state, "the last checkpoint took too long")
    cause = "it did not write its part in time"
    for worker in late:
        forget(state, now, worker, cause)
    phase.deadline = now + state.policy.save_timeout_s
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


def _open(state: CoreState, now: float, step: int) -> None:
    """All members write this step; whatever was wished for comes with it."""
    key = (step, state.generation)
    if key in state.stale_checkpoints or key in _saved_keys(state):
        return  # the second: workers report again what a restarted controller may not have heard
    if not state.stands(*key):
        state.stale_checkpoints.append(key)
        return
    assert state.held is not None, "members that write hold the state"
    assignment = state.held.assignment
    open_upload(state, now, state.generation, step, set(assignment.members), assignment)
    every_s = interval_s(state)
    state.save_at = now + every_s if every_s else None
    state.checkpoint_costs.begin()
    state.is_save_requested = False


def _expect_early(state: CoreState, now: float, event: PartWritten | PartFailed) -> None:
    """What becomes of a part may overtake the report of its step, or that report was lost."""
    first, last = state.unheard
    is_early = event.step > state.committed_step or first <= event.step <= last
    is_early = is_early and event.generation == state.generation
    if is_early and isinstance(state.phase, Running | Pausing):
        _open(state, now, event.step)


def _order_parts(state: CoreState, now: float, held: HeldState) -> SaveCheckpoint:
    """Parts of a broken attempt at this step may still arrive: a new number tells them apart."""
    state.generation += 1
    step, workers = state.committed_step, tuple(sorted(held.holders))
    open_upload(state, now, state.generation, step, held.holders, held.assignment)
    return SaveCheckpoint(state.generation, workers, step, held.assignment.generation)


def _retain(state: CoreState) -> list[Command]:
    """Of one step the latest is kept; and where audits may take the run back, what they would
    take it back to, whatever the next one says."""
    losses = {int(step): loss for step, loss in state.held_out_losses.items()}
    there = [saved.step for saved in state.saved]
    steps = kept(there, losses, state.policy)
    if state.policy.audit_every:
        clean = [step for step in there if step <= state.audited_step]
        steps |= {*clean[-1:], *there[len(clean) :]}
    latest = {saved.step: saved for saved in state.saved if saved.step in steps}
    dropped = [saved for saved in state.saved if latest.get(saved.step) != saved]
    remembered = known(sorted(latest), state.policy)
    state.saved = [saved for step, saved in latest.items() if step in remembered]
    return _drop(state, dropped)


def _drop(state: CoreState, dropped: list[Saved]) -> list[Command]:
    """With what is left of uploads that broke; never a checkpoint that is counted on."""
    keys = {*((saved.step, saved.generation) for saved in dropped), *state.stale_checkpoints}
    keys -= _saved_keys(state)
    state.stale_checkpoints = []
    return [DropCheckpoints(tuple(sorted(keys)))] if keys else []


def _saved_keys(state: CoreState) -> set[tuple[int, int]]:
    return {(saved.step, saved.generation) for saved in state.saved}
