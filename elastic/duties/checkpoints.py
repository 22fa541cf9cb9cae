"""Checkpoints: when one is due, when it is complete, which are kept, and the last one of a run.

Members write their parts at a step boundary that their vote decides, by steps, by time or on
request. Once all parts are written, the checkpoint is published, and older ones are removed as the
policy says. When the run ends, it saves the committed step first; a failed write is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from elastic.duties.membership import forget
from elastic.duties.recovery import find_live_state
from elastic.duties.uploads import (
    abandon,
    break_upload,
    break_uploads,
    end_older_parts,
    note_part,
    open_upload,
    take_finished,
    upload_key,
    write_patience_s,
)
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
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import HeldState
from elastic.protocol.events import Checkpointed, Evaluated, PartFailed, PartWritten, Saved
from elastic.protocol.phases import Ended as StoppedPhase
from elastic.protocol.phases import Ending, Pausing, Running, Saving
from elastic.protocol.policy import Policy, backoff_s
from elastic.protocol.votes import Vote

MAX_KNOWN = 128
"""Of checkpoints that are never removed, the core remembers this many."""
MIN_AUTO_S, MAX_AUTO_S = 60.0, 900.0
"""Values of the policy fields `checkpoint_least_s` and `checkpoint_most_s`."""
MAX_BACKOFF_S = 300.0
LAST_MAX_BACKOFF_S = 10.0
"""The longest pause between attempts at the last checkpoint, for which the run waits."""


def begin_saving(state: ControllerState, now: float) -> None:
    """A generation trains, and its members have no save request yet. If a due checkpoint was lost,
    request it at once."""
    state.checkpoints.is_save_requested = False
    state.checkpoints.costs.forget()
    every, every_s = state.job.checkpoint_every, interval_s(state)
    if (
        every
        and state.committed_step // every * every > state.checkpoints.saved_step
        and not state.checkpoints.uploads
    ):
        state.checkpoints.want_save(now)
    elif every_s and state.checkpoints.save_at is None:
        state.checkpoints.save_at = now + every_s
    elif state.policy.checkpoint_auto and state.checkpoints.save_at is not None:
        state.checkpoints.save_at = min(
            state.checkpoints.save_at, now + every_s
        )  # failures may shorten the interval


def interval_s(state: ControllerState) -> float:
    """The time from one checkpoint to the next; 0 if checkpoints are not made by time."""
    policy = state.policy
    if not policy.checkpoint_auto:
        return policy.checkpoint_every_s
    return state.checkpoints.costs.interval_s(policy.checkpoint_least_s, policy.checkpoint_most_s)


def is_saving(state: ControllerState) -> bool:
    """Whether this run makes checkpoints while it trains."""
    return state.job.checkpoint_every > 0 or interval_s(state) > 0.0


def save_request_deadline(state: ControllerState) -> float:
    """When to request a checkpoint; infinite if none is wanted, or one is under way."""
    if (
        state.checkpoints.save_at is None
        or state.checkpoints.is_save_requested
        or state.checkpoints.uploads
        or state.ending
    ):
        return inf
    return state.checkpoints.save_at


def request_save(state: ControllerState, now: float) -> list[Command]:
    """Order the members to save at the next boundary, if it is time to. Files of failed attempts
    are removed before: on a full disk they may take the space that is needed."""
    if now < save_request_deadline(state):
        return []
    state.checkpoints.is_save_requested = True
    return [
        *drop_broken(state),
        RequestCheckpoint(state.generation, state.live.members(), state.committed_step),
    ]


def expect_parts(state: ControllerState, now: float, vote: Vote) -> None:
    """If this vote decides a save, every member writes its part of the step without an order.

    After an abort it is unknown which members still write, unless a part was reported before.
    """
    is_guarded = vote.step + 1 == state.poison.guarded_step and not vote.num_pause_requests
    saves = vote.saves(state.job.checkpoint_every) or is_guarded
    if not isinstance(state.phase, Running | Pausing):
        if saves and upload_key(state.generation, vote.step) not in state.checkpoints.uploads:
            abandon(state, vote.step, state.generation, set(state.live.members()))
    elif saves:
        _open(state, now, vote.step)
    elif vote.is_save_due(state.job.checkpoint_every):
        state.checkpoints.want_save(now)


def on_part(state: ControllerState, now: float, event: PartWritten | PartFailed) -> list[Command]:
    """A member has written its part, or could not."""
    if isinstance(event, PartFailed):
        return _on_part_failed(state, now, event)
    _on_part_written(state, now, event)
    return []


def _on_part_written(state: ControllerState, now: float, event: PartWritten) -> None:
    _expect_early(state, now, event)
    key = upload_key(event.generation, event.step)
    upload = state.checkpoints.uploads.get(key)
    for worker, _ in event.parts:
        note_part(state, worker, key)
    if not upload:
        return
    writers = upload.pending.intersection(worker for worker, _ in event.parts)
    if not writers:
        return
    upload.files.update({file.name: file for worker, file in event.parts if worker in writers})
    upload.pending -= writers
    upload.written_s = now - upload.since
    if not upload.pending:
        state.checkpoints.costs.note_write(upload.written_s)


def _on_part_failed(state: ControllerState, now: float, event: PartFailed) -> list[Command]:
    """A part could not be written: try again later. Published checkpoints stay until there is a
    newer one."""
    _expect_early(state, now, event)
    is_first = break_upload(state, event.generation, event.step)
    note_part(state, event.worker, upload_key(event.generation, event.step))
    if not is_first:
        return []  # another part of this upload has failed before
    state.checkpoints.num_failures += 1
    first_s, num_failures = state.policy.save_backoff_s, state.checkpoints.num_failures
    phase = state.phase
    is_last = isinstance(phase, Saving) and event.step == state.committed_step
    longest_s = LAST_MAX_BACKOFF_S if is_last else MAX_BACKOFF_S
    retry_at = now + backoff_s(first_s, num_failures, longest_s)
    state.checkpoints.save_at = retry_at
    if isinstance(phase, Saving) and is_last:
        if retry_at >= phase.deadline:
            return stop(state, f"the last checkpoint could not be written: {event.cause}")
        phase.retry_at = retry_at
    return []


def publish_complete(state: ControllerState) -> list[Command]:
    """Publish complete uploads; an upload waits until the controller knows that its step has
    committed."""
    commands: list[Command] = []
    for upload in state.checkpoints.uploads.values():
        is_committed = upload.step <= state.committed_step
        if is_committed and not upload.pending and not upload.is_published:
            upload.is_published = True
            files = tuple(upload.files[name] for name in sorted(upload.files))
            layout, members = upload.assignment.layout, upload.assignment.members
            commands.append(
                PublishCheckpoint(upload.step, upload.generation, files, layout, members)
            )
    return commands


def on_stored(state: ControllerState, event: Checkpointed | CheckpointsRemoved) -> list[Command]:
    """A checkpoint has been published, or removals are confirmed."""
    if isinstance(event, CheckpointsRemoved):
        return []
    saved = Saved(event.step, event.generation, event.path)
    if upload := state.checkpoints.uploads.pop(upload_key(event.generation, event.step), None):
        end_older_parts(state, upload)
    if not state.checkpoints.counts(saved.step, saved.generation):
        state.checkpoints.stale.append((saved.step, saved.generation))
        return []
    state.checkpoints.saved = sorted(
        {*state.checkpoints.saved, saved}, key=lambda s: (s.step, s.generation)
    )
    break_uploads(state, lambda upload: upload.step <= event.step and not upload.is_published)
    state.checkpoints.num_failures = 0
    if event.step > state.committed_step:
        return drop_voided(state)
    commands = _retain(state)
    if isinstance(state.phase, Saving) and event.step == state.committed_step:
        return [*commands, *stop(state)]
    return commands


def note_held_out_loss(state: ControllerState, event: Evaluated) -> None:
    """Note the held-out loss of a step that is saved or being saved. A checkpoint without a finite
    loss is never among the best."""
    if event.loss is None:
        state.checkpoints.held_out_losses.pop(str(event.step), None)
        return
    state.checkpoints.held_out_losses[str(event.step)] = event.loss
    steps = {s.step for s in state.checkpoints.saved} | {
        u.step for u in state.checkpoints.uploads.values()
    }
    steps.add(state.committed_step)  # the report of its upload may come later
    losses = state.checkpoints.held_out_losses.items()
    state.checkpoints.held_out_losses = {step: loss for step, loss in losses if int(step) in steps}


def steps_to_keep(steps: Sequence[int], losses: Mapping[int, float], policy: Policy) -> set[int]:
    """Of these saved steps, those to keep: the newest, each multiple, and the best.

    `losses` are the known held-out losses by step; of equal ones the newer step is better.
    """
    if not policy.keep_last:
        return set(steps)
    kept_steps = set(sorted(steps)[-policy.keep_last :])
    if policy.keep_every:
        kept_steps.update(step for step in steps if step % policy.keep_every == 0)
    measured = sorted((losses[step], -step) for step in steps if step in losses)
    return kept_steps.union(-negative for _, negative in measured[: policy.keep_best])


def steps_to_remember(steps: Sequence[int], policy: Policy) -> set[int]:
    """Of these saved steps (ascending), those that the core remembers.

    Of checkpoints that are never removed, it remembers the newer ones densely and the older ones
    sparsely. A resumed run finds all of them in storage.
    """
    every = policy.keep_every
    never_removed = [s for s in steps if not policy.keep_last or (every and s % every == 0)]
    remembered = set(steps)
    while len(never_removed) > MAX_KNOWN:
        forgotten = never_removed[1 : MAX_KNOWN // 2 : 2]
        remembered.difference_update(forgotten)
        never_removed = [step for step in never_removed if step in remembered]
    return remembered


def drop_voided(state: ControllerState) -> list[Command]:
    """Remove checkpoints of steps after a rollback's target."""
    losses = state.checkpoints.held_out_losses.items()
    state.checkpoints.held_out_losses = {
        s: loss for s, loss in losses if int(s) <= state.committed_step
    }
    void = [saved for saved in state.checkpoints.saved if saved.step > state.committed_step]
    state.checkpoints.saved = [
        saved for saved in state.checkpoints.saved if saved.step <= state.committed_step
    ]
    return _drop(state, void)


def drop_broken(state: ControllerState) -> list[Command]:
    """Remove the files of broken uploads."""
    return _drop(state, [])


def is_saved(state: ControllerState) -> bool:
    """Whether the committed step is saved."""
    return state.committed_step <= state.checkpoints.saved_step


def end(state: ControllerState, now: float) -> list[Command]:
    """Write the last checkpoint if the state is available and not saved yet; else stop.

    The initial state needs no checkpoint: it can always be rebuilt.
    """
    if is_saved(state):
        return stop(state)
    held = find_live_state(state)
    if held is None and state.rollbacks.request:
        shortfall = f"step {state.committed_step} is not saved: {state.rollbacks.request.cause}"
        return stop(state, shortfall)
    if held is None:
        return stop(state, "the live workers do not hold the whole state: nothing to save")
    state.live.also_held = [other for other in state.live.holdings() if other is not held]
    state.live.held = held
    commands: list[Command] = []
    if upload_key(state.generation, state.committed_step) not in state.checkpoints.uploads:
        commands = [*drop_broken(state), _order_parts(state, now, held)]
    phase = state.phase
    last = phase if isinstance(phase, Saving) else Saving(0, now + write_patience_s(state))
    state.enter(Saving(state.generation, last.deadline, is_extended=last.is_extended))
    return commands


def on_deadline(state: ControllerState, now: float) -> list[Command]:
    """Retry a failed last checkpoint, or stop late writers if the others hold all of the state;
    else end without it. A written one gets its time once more to be published."""
    phase = state.phase
    assert isinstance(phase, Saving)
    if phase.retry_at is not None:
        return end(state, now) if now >= phase.retry_at else []
    upload = state.checkpoints.uploads.get(upload_key(state.generation, state.committed_step))
    if upload and upload.is_published and not phase.is_extended:
        phase.deadline, phase.is_extended = now + write_patience_s(state), True
        return []
    late = sorted(upload.pending) if upload else []
    if not late or not find_live_state(state, without=set(late)):
        return stop(state, "the last checkpoint took too long")
    cause = "it did not write its part in time"
    for worker in late:
        forget(state, now, worker, cause)
    phase.deadline = now + write_patience_s(state)
    return [*(StopWorker(worker, cause) for worker in late), *end(state, now)]


def stop(state: ControllerState, shortfall: str = "") -> list[Command]:
    """End the run. `shortfall` is what could not be done for it, reported beside the reason.

    A run that is not saved is not completed: it can be resumed from the last checkpoint.
    """
    ending = state.ending or Ending("completed")
    outcome = "failed" if shortfall and ending.outcome == "completed" else ending.outcome
    state.enter(StoppedPhase(outcome))
    reason = "; ".join(part for part in (ending.reason, shortfall) if part)
    return [Stopped(outcome, state.committed_step, reason, ending.traceback)]


def _open(state: ControllerState, now: float, step: int) -> None:
    """All members write this step; it also serves a pending save request."""
    key = (step, state.generation)
    if key in state.checkpoints.stale or key in _saved_keys(state):
        return  # already published: workers repeat reports for a restarted controller
    assert state.live.held is not None, "members that write hold the state"
    assignment = state.live.held.assignment
    if not state.checkpoints.counts(*key):
        abandon(state, *key, set(assignment.members))
        return
    open_upload(state, now, state.generation, step, set(assignment.members), assignment)
    every_s = interval_s(state)
    state.checkpoints.save_at = now + every_s if every_s else None
    state.checkpoints.costs.begin()
    state.checkpoints.is_save_requested = False


def _expect_early(state: ControllerState, now: float, event: PartWritten | PartFailed) -> None:
    """Open the upload if a part is reported before its step, or if the step's report was lost."""
    first, last = state.steps.unheard
    is_new = event.step > state.checkpoints.saved_step
    is_early = event.step > state.committed_step or (first <= event.step <= last and is_new)
    is_early = is_early and event.generation == state.generation
    if is_early and isinstance(state.phase, Running | Pausing):
        _open(state, now, event.step)


def _order_parts(state: ControllerState, now: float, held: HeldState) -> SaveCheckpoint:
    """Order the last checkpoint under a new generation number, which distinguishes its parts from
    late parts of a failed attempt at the same step."""
    state.generation += 1
    step, workers = state.committed_step, tuple(sorted(held.holders))
    open_upload(state, now, state.generation, step, held.holders, held.assignment)
    return SaveCheckpoint(state.generation, workers, step, held.assignment.generation)


def _retain(state: ControllerState) -> list[Command]:
    """Remove checkpoints that the policy does not keep. Of one step the latest is kept. If audits
    may roll the run back, the target of the rollback is kept as well."""
    losses = {int(step): loss for step, loss in state.checkpoints.held_out_losses.items()}
    saved_steps = [saved.step for saved in state.checkpoints.saved]
    steps = steps_to_keep(saved_steps, losses, state.policy)
    if state.policy.audit_every:
        clean = [step for step in saved_steps if step <= state.audits.audited_step]
        steps |= {*clean[-1:], *saved_steps[len(clean) :]}
    latest = {saved.step: saved for saved in state.checkpoints.saved if saved.step in steps}
    dropped = [saved for saved in state.checkpoints.saved if latest.get(saved.step) != saved]
    remembered = steps_to_remember(sorted(latest), state.policy)
    state.checkpoints.saved = [saved for step, saved in latest.items() if step in remembered]
    return _drop(state, dropped)


def _drop(state: ControllerState, dropped: list[Saved]) -> list[Command]:
    """Remove these checkpoints and the files of broken uploads, but never a checkpoint in use."""
    keys = {*((saved.step, saved.generation) for saved in dropped), *state.checkpoints.stale}
    keys |= take_finished(state)
    keys -= _saved_keys(state)
    state.checkpoints.stale = []
    return [DropCheckpoints(tuple(sorted(keys)))] if keys else []


def _saved_keys(state: ControllerState) -> set[tuple[int, int]]:
    return {(saved.step, saved.generation) for saved in state.checkpoints.saved}
