"""The core: a synchronous state machine. Events and the time come in, commands go out.

It reads no clock, starts nothing and never waits: the Ray shell and the simulator drive the same
code. Each step first takes the event in, phase by phase, and then does what the new state calls
for by itself: form, pause, start workers.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import assert_never

from elastic import (
    aborting,
    auditing,
    avoiding,
    catch_up,
    controller_errors,
    forming,
    giving_way,
    growing,
    late_writers,
    leaving,
    protecting,
    roster,
    running,
    saving,
    straggling,
    wishing,
)
from elastic.commands import Command, StartStore, StopWorker
from elastic.controller_events import (
    CheckpointsRemoved,
    ControllerRaised,
    ControllerRecovered,
    ControllerRestarted,
    WorkerAnswered,
    WorkersStandStill,
)
from elastic.events import (
    Audited,
    CheckpointDamaged,
    Checkpointed,
    ComputeTimed,
    Evaluated,
    Event,
    GroupFormed,
    KeeperLost,
    KeeperReady,
    KeeperSuspected,
    KeeperTold,
    LayoutRequested,
    NodeAtRisk,
    NodeDraining,
    PartFailed,
    PartWritten,
    Paused,
    Progressed,
    Quiesced,
    RunOpened,
    Settled,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreLost,
    StoreReady,
    Woke,
    WorkerLeaving,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
    WorkerSuspected,
)
from elastic.phases import (
    Aborting,
    Breakable,
    Ending,
    Forming,
    Pausing,
    Relaying,
    Running,
    Saving,
    Stopped,
    Waiting,
)
from elastic.recovery import INITIAL_STEP, living
from elastic.state import CoreState
from elastic.step_records import RecordsSent


class Core:
    """The controller's decisions; `state` is all that they are made from."""

    def __init__(self, state: CoreState | None = None) -> None:
        self.state = state or CoreState()

    def step(self, now: float, event: Event) -> list[Command]:
        """Take one event in; return what is to be done, in order. `now` is in seconds."""
        kept_up = RunOpened | ControllerRaised
        if isinstance(self.state.phase, Stopped) and not isinstance(event, kept_up):
            return []
        commands = self._take(now, event)
        if isinstance(event, ControllerRaised):
            return commands  # what raised in a follow-up shall not raise again here
        return commands + self._follow_up(now)

    def next_deadline(self) -> float | None:
        """When the core wants to be woken, in seconds, if nothing happens before."""
        state, phase = self.state, self.state.phase
        times = [roster.start_deadline(state), leaving.leave_deadline(state)]
        times += [leaving.drain_end(state), avoiding.avoid_deadline(state)]
        times += [state.catch_up.deadline] if state.catch_up else []
        match phase:
            case Waiting():
                times += [inf if phase.until is None else phase.until]
                times += [protecting.asking_deadline(state)]
                times += [giving_way.give_way_deadline(state)]
            case Running():
                times += [running.hang_deadline(state, phase), growing.growth_deadline(state)]
                times += [growing.idle_deadline(state)]
                times += [protecting.protect_deadline(state), saving.wish_deadline(state)]
                times += [late_writers.upload_deadline(state)]
            case Pausing():
                times += [running.hang_deadline(state, phase)]
            case Aborting() if state.catch_up:
                pass  # only for the one that sends records
            case Forming() | Relaying() | Aborting():
                times += [phase.deadline]
            case Saving():
                times += [phase.deadline if phase.retry_at is None else phase.retry_at]
            case Stopped():
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
                state.store_host, state.store_port = event.host, event.port
            case StoreLost():
                state.store_host, state.store_port = "", 0
                return [StartStore()]
            case KeeperReady() | KeeperSuspected() | KeeperLost() | KeeperTold():
                return protecting.on_keeper(state, now, event)
            case WorkerReady():
                told = roster.welcome(state, now, event)
                return told + avoiding.let_go_of_spares(state)
            case WorkerLost():
                return self._lose(now, event) + avoiding.let_go_of_spares(state)
            case WorkerSuspected() | WorkerAnswered() | WorkersStandStill():
                return self._take_watch(now, event)
            case WorkerLeaving() | NodeDraining() | NodeAtRisk():
                return leaving.on_notice(state, now, event)
            case WorkerRaised():
                return aborting.on_raised(state, now, event)
            case LayoutRequested():
                return wishing.on_layout_requested(state, event)
            case StopRequested():
                return aborting.on_stop_requested(state, now, event)
            case Woke():
                return self._wake(now)
            case _:
                return self._take_report(now, event)
        return []

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
        | Settled
        | RecordsSent
        | PartWritten
        | PartFailed
        | Checkpointed
        | CheckpointsRemoved
        | CheckpointDamaged,
    ) -> list[Command]:
        """What workers tell of the generation's work; stale tellings change nothing."""
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
                return straggling.on_timed(state, now, event)
            case Audited():
                return auditing.on_audited(state, now, event)
            case Paused():
                return running.on_paused(state, now, event)
            case Quiesced():
                return aborting.on_quiesced(state, now, event)
            case Settled():
                return aborting.on_settled(state, now, event)
            case PartWritten():
                saving.on_part_written(state, now, event)
            case PartFailed():
                return saving.on_part_failed(state, now, event)
            case Checkpointed() | CheckpointsRemoved():
                return saving.on_stored(state, event)
            case CheckpointDamaged():
                return aborting.on_damaged(state, now, event)
            case _:
                assert_never(event)
        return []

    def _open(self, now: float, event: RunOpened) -> list[Command]:
        """Begin, or begin again: nothing of an earlier incarnation lives."""
        old = self.state
        if old.incarnation and not isinstance(old.phase, Stopped):
            old.checkpoint_costs.note_failure(old.generation)  # all of that session was lost
        standing = [one for one in event.saved if old.stands(one.step, one.generation)]
        step = standing[-1].step if standing else INITIAL_STEP
        generation = max(old.generation, event.newest_generation)
        is_done = step >= event.job.steps
        self.state = CoreState(
            policy=event.policy,
            wish=event.wish,
            job=event.job,
            digest=event.job.digest or None,
            incarnation=event.incarnation,
            generation=generation,
            history=generation,
            phase=Waiting("starting", now),
            committed_step=step if is_done else max(old.committed_step, step),
            evaluated_step=old.evaluated_step,
            next_worker=old.next_worker,
            saved=standing,
            litter=[(one.step, one.generation) for one in event.saved if one not in standing],
            skipped_since=None if isinstance(old.phase, Stopped) else old.skipped_since,
            recent_losses=[(at, loss) for at, loss in old.recent_losses if at <= step],
            audited_step=step,
            rewind=old.rewind,
            rewound_from=old.rewound_from,
            num_rewinds=old.num_rewinds,
            voids=old.voids,
            left_out=old.left_out,
            controller_errors=old.controller_errors,
            checkpoint_costs=old.checkpoint_costs,
        )
        if is_done:
            self.state.ending = Ending("completed", f"step {step} is saved: nothing to do")
            return []
        return [StartStore()]

    def _lose(self, now: float, event: WorkerLost) -> list[Command]:
        state = self.state
        concerned = event.worker in roster.participants(state)
        told = avoiding.on_crash(state, now, event)
        roster.forget(state, now, event.worker, event.cause)
        match state.phase:
            case Aborting():
                return told + aborting.on_lost(state, now, event.worker)
            case Saving() if concerned:
                return told + forming.save_anew(state, now)
            case Forming() | Relaying() | Running() | Pausing() if concerned:
                cause = f"{event.worker}: {event.cause}"
                return told + aborting.abort(state, now, cause, num_lost=1)
        return told

    def _take_watch(
        self, now: float, event: WorkerSuspected | WorkerAnswered | WorkersStandStill
    ) -> list[Command]:
        """What probes have shown."""
        state = self.state
        if not isinstance(event, WorkerSuspected):
            return aborting.on_watched(state, event)
        if event.worker not in state.warm:
            return []
        state.seats[event.worker].silent_in = state.generation
        if event.worker not in roster.participants(state):
            return [StopWorker(event.worker, event.cause)]
        if isinstance(state.phase, Breakable):
            cause = f"{event.worker}: {event.cause}"
            return aborting.abort(state, now, cause, suspects={event.worker})
        if isinstance(state.phase, Aborting):
            return aborting.on_suspected(state, now, event.worker)
        if isinstance(state.phase, Saving) and living(state, without={event.worker}):
            return [StopWorker(event.worker, event.cause)]
        return []

    def _wake(self, now: float) -> list[Command]:
        """Something took too long."""
        state, phase = self.state, self.state.phase
        protecting.stop_asking(state, now)
        leaving.end_drains(state, now)
        if state.catch_up and now >= state.catch_up.deadline:
            return catch_up.on_deadline(state, now)
        if now >= leaving.leave_deadline(state):
            return leaving.leave_at_once(state, now)
        match phase:
            case Forming() | Relaying() if now >= phase.deadline:
                late = ", ".join(sorted(phase.pending)[:4])
                cause = f"{type(phase).__name__} is late: {late}"
                if isinstance(phase, Forming):
                    forming.note_time(state, now, phase)
                return aborting.abort(state, now, cause)
            case Running() | Pausing() if now >= running.hang_deadline(state, phase):
                return aborting.abort(state, now, "no progress: a worker hangs", is_hang=True)
            case Aborting() if now >= phase.deadline and not state.catch_up:
                return aborting.on_deadline(state, now)
            case Saving() if now >= phase.deadline or phase.retry_at is not None:
                return saving.on_deadline(state, now)
        return []

    def _follow_up(self, now: float) -> list[Command]:
        state, commands = self.state, saving.publish_whole(self.state)
        if catch_up.is_over(state):
            commands += self._go_on_after_catch_up(now)
        if controller_errors.is_failing(state):
            return commands + controller_errors.go_to_the_end(state, now)
        commands += avoiding.follow_up(state, now)
        if isinstance(state.phase, Waiting):
            commands += giving_way.give_way(state, now) + forming.go_on(state, now)
        elif isinstance(state.phase, Running):
            commands += late_writers.let_go(state, now) + running.stop_at_boundary(state, now)
            commands += protecting.protect(state, now)
            commands += saving.wish(state, now) + growing.give_back(state, now)
        return commands + roster.start_missing(state, now)

    def _go_on_after_catch_up(self, now: float) -> list[Command]:
        if isinstance(self.state.phase, Aborting):
            return aborting.on_caught_up(self.state, now)
        return running.on_caught_up(self.state, now)
