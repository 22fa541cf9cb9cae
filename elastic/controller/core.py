"""The controller core: a synchronous, pure state machine that turns events into commands.

It reads no clock, starts nothing and never waits: the Ray shell and the simulator drive the same
code. Each step first handles the event, depending on the phase. Then it takes the actions that the
new state calls for: form, pause, start workers.
"""

from __future__ import annotations

from functools import partial
from math import inf, isfinite
from typing import assert_never

from elastic.controller import (
    aborting,
    audit,
    controller_errors,
    drain,
    forming,
    health,
    market,
    running,
    stragglers,
)
from elastic.controller.capacity import growth
from elastic.controller.capacity.next_assignment import can_train, note_reshard
from elastic.duties import (
    catch_up,
    checkpoints,
    gang_backoff,
    layout_requests,
    membership,
    quarantine,
    snapshots,
    uploads,
)
from elastic.duties.recovery import INITIAL_STEP, find_live_state
from elastic.protocol.commands import Command, StartStore, StopWorker
from elastic.protocol.controller_events import (
    CheckpointsRemoved,
    ControllerRaised,
    ControllerRecovered,
    ControllerRestarted,
    WorkerAnswered,
    WorkerPlaced,
    WorkersStalled,
)
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_state import (
    AuditDuty,
    CheckpointDuty,
    ErrorDuty,
    LayoutDuty,
    LossDuty,
    MarketDuty,
    MembershipDuty,
)
from elastic.protocol.events import (
    Audited,
    CheckpointDamaged,
    Checkpointed,
    ComputeTimed,
    Evaluated,
    Event,
    GroupFormed,
    HangObserved,
    LayoutRequested,
    NodeAtRisk,
    NodeDraining,
    PartFailed,
    PartWritten,
    Paused,
    Progressed,
    Quiesced,
    RolledForward,
    RunOpened,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreLost,
    StoreReady,
    Woke,
    WorkerDraining,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
    WorkerSuspected,
)
from elastic.protocol.phases import (
    Aborting,
    Breakable,
    Ended,
    Ending,
    Forming,
    Pausing,
    Resharding,
    Running,
    Saving,
    Waiting,
)
from elastic.protocol.snapshot_events import (
    SnapshotServerLost,
    SnapshotServerReady,
    SnapshotServerReported,
    SnapshotServerSuspected,
    SnapshotTimed,
)
from elastic.protocol.step_records import RecordsSent


class Core:
    """Makes all decisions of the controller from `state` alone."""

    def __init__(self, state: ControllerState | None = None) -> None:
        self.state = state or ControllerState()

    def step(self, now: float, event: Event) -> list[Command]:
        """Handle one event; return the commands to carry out, in order. `now` is in seconds."""
        handled_when_ended = RunOpened | ControllerRaised
        if isinstance(self.state.phase, Ended) and not isinstance(event, handled_when_ended):
            return []
        commands = self._take(now, event)
        if isinstance(event, ControllerRaised):
            return commands  # a follow-up may have raised: do not run it again here
        return commands + self._follow_up(now)

    def next_deadline(self) -> float | None:
        """When to wake the core, in seconds, if no event arrives before; None for never."""
        state, phase = self.state, self.state.phase
        times = [membership.start_deadline(state), drain.drain_deadline(state)]
        times += [drain.drain_end(state), quarantine.quarantine_deadline(state)]
        times += [market.market_deadline(state)]
        times += [state.steps.catch_up.deadline] if state.steps.catch_up else []
        match phase:
            case Waiting():
                times += [inf if phase.until is None else phase.until]
                times += [snapshots.query_deadline(state), gang_backoff.return_deadline(state)]
            case Running():
                times += [running.hang_deadline(state, phase), growth.growth_deadline(state)]
                times += [growth.idle_deadline(state)]
                times += [
                    snapshots.placement_deadline(state),
                    checkpoints.save_request_deadline(state),
                ]
                times += [uploads.upload_deadline(state)]
            case Pausing():
                times += [running.hang_deadline(state, phase)]
            case Aborting() if state.steps.catch_up:
                pass  # the deadline of the catch-up counts instead
            case Forming() | Resharding() | Aborting():
                times += [phase.deadline]
            case Saving():
                times += [phase.deadline if phase.retry_at is None else phase.retry_at]
            case Ended():
                return None
            case _:
                assert_never(phase)
        soonest = min(times)
        return soonest if isfinite(soonest) else None

    def _take(self, now: float, event: Event) -> list[Command]:
        state = self.state
        match event:
            case RunOpened():
                return self._open(now, event)
            case ControllerRestarted() | ControllerRaised() | ControllerRecovered():
                return controller_errors.on_controller(state, now, event)
            case StoreReady():
                state.store.host, state.store.port = event.host, event.port
            case StoreLost():
                state.store.host, state.store.port = "", 0
                return [StartStore()]
            case (
                SnapshotServerReady()
                | SnapshotServerSuspected()
                | SnapshotServerLost()
                | SnapshotServerReported()
                | SnapshotTimed()
            ):
                return snapshots.on_snapshots(state, now, event)
            case WorkerReady() | WorkerPlaced():
                return self._add_worker(now, event)
            case WorkerLost():
                return self._lose(now, event)
            case WorkerSuspected() | WorkerAnswered() | WorkersStalled():
                return self._take_watch(now, event)
            case WorkerDraining() | NodeDraining() | NodeAtRisk():
                return drain.on_notice(state, now, event)
            case WorkerRaised():
                return aborting.on_raised(state, now, event)
            case LayoutRequested():
                return layout_requests.on_layout_requested(state, event)
            case StopRequested():
                return aborting.on_stop_requested(state, now, event)
            case Woke():
                return self._wake(now)
            case _:
                return self._take_report(now, event)
        return []

    def _add_worker(self, now: float, event: WorkerReady | WorkerPlaced) -> list[Command]:
        state = self.state
        if isinstance(event, WorkerPlaced):
            return market.on_placed(state, event)
        if event.worker in state.membership.warm:
            return []  # reported again after a restart of the controller
        commands = membership.add_ready_worker(state, now, event)
        commands += market.check_label(state, event.worker, event.market)
        fits = partial(can_train, state)
        return commands + health.compare_new_device(state, now, event.worker, fits)

    def _take_report(
        self,
        now: float,
        event: GroupFormed
        | StateReady
        | StepCommitted
        | Progressed
        | ComputeTimed
        | Evaluated
        | Audited
        | Paused
        | Quiesced
        | HangObserved
        | RolledForward
        | RecordsSent
        | PartWritten
        | PartFailed
        | Checkpointed
        | CheckpointsRemoved
        | CheckpointDamaged,
    ) -> list[Command]:
        """Handle what workers report of the generation's work; stale reports change nothing."""
        state = self.state
        match event:
            case GroupFormed():
                return forming.on_group_formed(state, now, event)
            case StateReady():
                return forming.on_state_ready(state, now, event)
            case StepCommitted() | RecordsSent():
                return running.on_steps_reported(state, now, event)
            case Progressed() | Evaluated():
                return running.on_progressed(state, now, event)
            case ComputeTimed():
                return stragglers.on_timed(state, now, event)
            case Audited():
                return audit.on_audited(state, now, event)
            case Paused():
                return running.on_paused(state, now, event)
            case Quiesced():
                return aborting.on_quiesced(state, now, event)
            case HangObserved():
                pass  # for people: the journal keeps it
            case RolledForward():
                return aborting.on_rolled_forward(state, now, event)
            case PartWritten() | PartFailed():
                return checkpoints.on_part(state, now, event)
            case Checkpointed() | CheckpointsRemoved():
                return checkpoints.on_stored(state, event)
            case CheckpointDamaged():
                return aborting.on_damaged(state, now, event)
            case _:
                assert_never(event)
        return []

    def _open(self, now: float, event: RunOpened) -> list[Command]:
        """Start or resume a run: no process of an earlier incarnation lives."""
        old = self.state
        if old.incarnation and not isinstance(old.phase, Ended):
            old.checkpoints.costs.note_failure(old.generation)  # all of that session was lost
        valid = [
            saved for saved in event.saved if old.checkpoints.counts(saved.step, saved.generation)
        ]
        step = valid[-1].step if valid else INITIAL_STEP
        losses, saved_steps = old.checkpoints.held_out_losses, [str(s.step) for s in valid]
        generation = max(old.generation, event.newest_generation)
        is_done = step >= event.job.steps and not old.has_failed
        self.state = ControllerState(
            policy=event.policy,
            job=event.job,
            incarnation=event.incarnation,
            generation=generation,
            lineage=generation,
            phase=Waiting("starting", now),
            committed_step=step if is_done else max(old.committed_step, step),
            evaluated_step=old.evaluated_step,
            layouts=LayoutDuty(event.target_layout),
            membership=MembershipDuty(
                digest=event.job.digest or None, next_worker=old.membership.next_worker
            ),
            checkpoints=CheckpointDuty(
                saved=valid,
                stale=[(s.step, s.generation) for s in event.saved if s not in valid],
                voided=old.checkpoints.voided,
                held_out_losses={at: losses[at] for at in saved_steps if at in losses},
                costs=old.checkpoints.costs,
            ),
            losses=LossDuty(
                skipped_since=None if isinstance(old.phase, Ended) else old.losses.skipped_since,
                recent=[(at, loss) for at, loss in old.losses.recent if at <= step],
            ),
            audits=AuditDuty(audited_step=step),
            rollbacks=old.rollbacks,
            market=MarketDuty(opened_at=old.market.opened_at or now),
            errors=ErrorDuty(counts=old.errors.counts),
        )
        if is_done:
            self.state.ending = Ending("completed", f"step {step} is saved: nothing to do")
            return []
        return [StartStore()]

    def _lose(self, now: float, event: WorkerLost) -> list[Command]:
        """Handle a lost worker: note the crash, remove it, abort if it took part."""
        state = self.state
        is_participant = event.worker in membership.participants(state)
        commands = quarantine.on_crash(state, now, event)
        market.note_lost(state, now, event.worker)
        membership.forget(state, now, event.worker, event.cause)
        match state.phase:
            case Aborting():
                return commands + aborting.on_lost(state, now, event.worker)
            case Saving() if is_participant:
                return commands + forming.retry_final_save(state, now)
            case Forming() | Resharding() | Running() | Pausing() if is_participant:
                cause = f"{event.worker}: {event.cause}"
                return commands + aborting.abort(state, now, cause, num_lost=1)
        return commands

    def _take_watch(
        self, now: float, event: WorkerSuspected | WorkerAnswered | WorkersStalled
    ) -> list[Command]:
        """Handle what probes report."""
        state = self.state
        if not isinstance(event, WorkerSuspected):
            return aborting.on_watched(state, event)
        if event.worker not in state.membership.warm:
            return []
        state.membership.records[event.worker].silent_in = state.generation
        if event.worker not in membership.participants(state):
            return [StopWorker(event.worker, event.cause)]
        if isinstance(state.phase, Breakable):
            cause = f"{event.worker}: {event.cause}"
            return aborting.abort(state, now, cause, suspects={event.worker})
        if isinstance(state.phase, Aborting):
            return aborting.on_suspected(state, now, event.worker)
        if isinstance(state.phase, Saving) and find_live_state(state, without={event.worker}):
            return [StopWorker(event.worker, event.cause)]
        return []

    def _wake(self, now: float) -> list[Command]:
        """Handle deadlines that have passed."""
        state, phase = self.state, self.state.phase
        snapshots.stop_querying(state, now)
        drain.end_drains(state, now)
        if state.steps.catch_up and now >= state.steps.catch_up.deadline:
            return catch_up.on_deadline(state, now)
        if now >= drain.drain_deadline(state):
            return drain.drain_at_once(state, now)
        match phase:
            case Forming() | Resharding() if now >= phase.deadline:
                pending = ", ".join(sorted(phase.pending)[:4])
                cause = f"{type(phase).__name__} timed out waiting for {pending}"
                if isinstance(phase, Forming):
                    forming.note_time(state, now, phase)
                    return aborting.abort(state, now, cause)
                note_reshard(state, phase, is_late=True)
                return aborting.abort_late_reshard(state, now, cause)
            case Running() | Pausing() if now >= running.hang_deadline(state, phase):
                return aborting.abort(state, now, "no progress: a worker hangs", is_hang=True)
            case Aborting() if now >= phase.deadline and not state.steps.catch_up:
                return aborting.on_deadline(state, now)
            case Saving() if now >= phase.deadline or phase.retry_at is not None:
                return checkpoints.on_deadline(state, now)
        return []

    def _follow_up(self, now: float) -> list[Command]:
        """Take the actions that the new state calls for."""
        state, commands = self.state, checkpoints.publish_complete(self.state)
        if catch_up.is_over(state):
            commands += self._continue_after_catch_up(now)
        if controller_errors.is_failing(state):
            return commands + controller_errors.continue_to_end(state, now)
        commands += quarantine.follow_up(state, now)
        if isinstance(state.phase, Waiting):
            commands += gang_backoff.return_workers(state, now) + forming.form_or_end(state, now)
        elif isinstance(state.phase, Running):
            commands += uploads.handle_late_uploads(state, now) + running.stop_at_boundary(
                state, now
            )
            commands += snapshots.update_placement(state, now)
            commands += checkpoints.request_save(state, now) + growth.release_idle_standbys(
                state, now
            )
        commands += market.follow_up(state, now)
        return commands + membership.start_missing(state, now)

    def _continue_after_catch_up(self, now: float) -> list[Command]:
        if isinstance(self.state.phase, Aborting):
            return aborting.on_caught_up(self.state, now)
        return running.on_caught_up(self.state, now)
