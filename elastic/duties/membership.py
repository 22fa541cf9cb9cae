"""Membership: which workers exist and are ready, and when new ones start."""

from __future__ import annotations

from elastic.duties.poison_batches import note_loss
from elastic.duties.uploads import break_uploads
from elastic.protocol.commands import Command, StartWorkers, StopWorker, Warned
from elastic.protocol.controller_state import CoreState, WorkerRecord
from elastic.protocol.events import WorkerRaised, WorkerReady
from elastic.protocol.phases import Ending, Forming, Resharding, Running, Waiting
from elastic.protocol.policy import backoff_s

MAX_BACKOFF_S = 60.0
NUM_RECENT_STARTS = 8
NUM_RECENT_CHANGES = 5
"""The mean time between changes is taken over this many."""


def participants(state: CoreState) -> set[str]:
    """The live workers that take part in the current generation."""
    phase = state.phase
    if isinstance(phase, Forming | Resharding):
        return set(phase.attempt.plan.participants) & state.worker_records.keys()
    return set(state.members()) & state.worker_records.keys()


def add_ready_worker(state: CoreState, now: float, event: WorkerReady) -> list[Command]:
    """A worker has warmed up: it is on standby until an assignment takes it.

    A worker that runs other source code than the driver is rejected before any data reaches it.
    """
    if event.worker not in state.worker_records:
        return []  # its loss was reported first
    if event.worker in state.warm:
        return []  # reported again after a restart of the controller
    if state.digest not in (None, event.digest):
        return _reject_other_sources(state, now, event)
    state.digest = event.digest
    start_s = now - state.worker_records[event.worker].since
    state.recent_start_s = [*state.recent_start_s[1 - NUM_RECENT_STARTS :], start_s]
    worker_record = WorkerRecord(
        now, event.node, event.rack, event.pid, event.memory_bytes, event.device
    )
    worker_record.is_ready = True
    state.worker_records[event.worker] = worker_record
    state.warm.add(event.worker)
    state.ever_ready = True
    state.num_start_failures = 0
    state.no_start_before = 0.0
    if event.node in state.node_drains:
        state.draining.add(event.worker)
        state.node_drains[event.node].draining_workers.add(event.worker)
        return [StopWorker(event.worker, "its node is draining")]
    if state.standby_since is None:
        state.standby_since = now
    if state.idle_since is None:
        state.idle_since = now
    return []


def forget(state: CoreState, now: float, worker: str, cause: str, outcome: str = "failed") -> None:
    """Remove a worker that is gone, with what it held or was writing."""
    if worker not in state.worker_records:
        return
    if worker not in state.warm | state.draining:
        _count_start_failure(state, now, cause, outcome)
    if worker not in state.draining and worker in state.members():
        note_change(state, now)
        note_loss(state, worker)
        state.checkpoint_costs.note_failure(state.generation)
    del state.worker_records[worker]
    state.warm.discard(worker)
    state.draining.discard(worker)
    state.late_writers.discard(worker)
    for held in state.holdings():
        held.holders.discard(worker)
    if break_uploads(state, lambda upload: worker in upload.pending):
        state.want_save(now)  # else the next one would come a full interval after the lost one


def note_change(state: CoreState, now: float) -> None:
    """Members are lost, or drain; all changes within one generation count as one."""
    if state.changed_generation != state.generation:
        state.changed_generation = state.generation
        state.changes_at = [*state.changes_at[1 - NUM_RECENT_CHANGES :], now]
    state.num_given_back = 0


def start_missing(state: CoreState, now: float) -> list[Command]:
    """Start workers up to the wanted number.

    None start while survivors recover: the imports of a starting process would slow down their
    first step (measured 0.1 s of 0.2 s on two cores).
    """
    if now < start_deadline(state):
        return []
    num_missing = _num_missing(state)
    names = tuple(f"w{state.next_worker + i}" for i in range(num_missing))
    state.next_worker += num_missing
    quarantined = tuple(sorted(state.quarantined))
    state.worker_records.update(
        {name: WorkerRecord(now, quarantined=quarantined) for name in names}
    )
    return [StartWorkers(names, quarantined)]


def start_deadline(state: CoreState) -> float:
    """When the back-off before new starts is over; infinite if no worker is missing."""
    if not _num_missing(state):
        return float("inf")
    return max(state.no_start_before, state.not_again_before)


def _num_missing(state: CoreState) -> int:
    """How many workers to start; 0 during a recovery."""
    is_calm = (isinstance(state.phase, Waiting) and not state.phase.is_short) or (
        isinstance(state.phase, Running) and state.phase.num_commits > 0
    )
    if not is_calm or state.ending:
        return 0
    num_wanted = state.policy.max_workers - state.num_given_back
    return max(0, num_wanted - (len(state.worker_records) - len(state.draining)))


def _reject_other_sources(state: CoreState, now: float, event: WorkerReady) -> list[Command]:
    """Stop a worker that runs other source code; if none has trained yet, end the run."""
    cause = (
        f"{event.worker} on {event.node} runs other source code than the driver: install the same "
        "working tree on every node, or ship it with `ray job submit --working-dir .`"
    )
    if not state.ever_formed:
        state.ending = Ending("user_error", cause)
    forget(state, now, event.worker, cause)
    return [StopWorker(event.worker, cause)]


def reject_unfit_worker(state: CoreState, now: float, event: WorkerRaised) -> list[Command]:
    """A new worker's machine lacks something: the run continues with others, unless there are
    none."""
    text = f"{event.worker}: {event.message}"
    forget(state, now, event.worker, event.message, outcome="user_error")
    return [
        Warned(state.generation, state.committed_step, "machine", text),
        StopWorker(event.worker, event.message),
    ]


def _count_start_failure(state: CoreState, now: float, cause: str, outcome: str = "failed") -> None:
    """Back off before the next start; end the run after too many failures without a ready
    worker."""
    state.num_start_failures += 1
    reason = f"workers die while they start: {cause}"
    first_s, num_failures = state.policy.restart_backoff_s, state.num_start_failures
    state.no_start_before = now + backoff_s(first_s, num_failures, MAX_BACKOFF_S)
    max_failures = state.policy.max_start_failures
    if outcome == "user_error":
        # All workers of one machine fail at once, others may not.
        max_failures += state.policy.max_workers
        reason = cause
    if state.num_start_failures >= max_failures and not state.ever_ready:
        state.ending = Ending(outcome, reason)
