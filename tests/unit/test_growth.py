"""When a run grows, returns standby workers, and backs off for other gangs."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from test_core import open_run, ready_event

from elastic.controller.core import Core
from elastic.duties.gang_backoff import return_deadline
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, StartWorkers, StopWorker
from elastic.protocol.events import (
    Event,
    GroupFormed,
    Paused,
    Quiesced,
    StateReady,
    StepCommitted,
    Woke,
    WorkerLost,
)
from elastic.protocol.notes import Waited
from elastic.protocol.phases import Forming, Pausing, Resharding, Running, Waiting
from elastic.protocol.votes import StepRecord, Vote

STEP_S = 0.5


class SteppedRun:
    """A core with its own clock, whose workers do as the core orders."""

    def __init__(self, core: Core) -> None:
        self.core, self.now = core, 1.0

    def deliver(self, *events: Event) -> list[Command]:
        return [command for event in events for command in self.core.step(self.now, event)]

    def join(self, *workers: str) -> list[Command]:
        return self.deliver(*(ready_event(worker) for worker in workers))

    def wake(self) -> list[Command]:
        """Advance the clock to the next deadline of the core."""
        woken = self.core.next_deadline()
        assert woken is not None
        self.now = max(self.now, woken)
        return self.deliver(Woke())

    def form(self, takes_s: float = 0.0) -> None:
        """Let the generation that forms reach training and commit a step."""
        generation, phase = self.core.state.generation, self.core.state.phase
        assert isinstance(phase, Forming)
        participants = phase.attempt.plan.participants
        self.now += takes_s
        self.deliver(*(GroupFormed(worker, generation) for worker in participants))
        assert isinstance(self.core.state.phase, Resharding)
        self.deliver(*(StateReady(w, generation, 0, 0, 0.0, 0, 0, 0) for w in participants))
        assert isinstance(self.core.state.phase, Running)
        self.commit()

    def commit(self, num_steps: int = 1) -> None:
        state = self.core.state
        for _ in range(num_steps):
            self.now += STEP_S
            step, size = state.committed_step + 1, len(state.live.members())
            record = StepRecord(
                self.now, step, state.generation, size, 1.0, 8, 0.1, 1.0, STEP_S, False
            )
            vote = Vote(step, 8.0, 8, 1.0, size)
            self.deliver(StepCommitted(state.generation, record, vote))

    def pause(self) -> None:
        state = self.core.state
        assert isinstance(state.phase, Pausing)
        reports = (Paused(w, state.generation, state.committed_step) for w in state.live.members())
        self.deliver(*reports)

    def lose(self, worker: str) -> None:
        """Lose a worker; the survivors quiesce."""
        self.deliver(WorkerLost(worker, "killed"))
        generation = self.core.state.generation
        step = self.core.state.committed_step
        survivors = [w for w in self.core.state.live.members() if w != worker]
        self.deliver(*(Quiesced(w, generation, step) for w in survivors))


def make_training_run(pause_s: float = 0.0, **policy: float) -> SteppedRun:
    """Two workers, after one growth from a single worker with a pause of `pause_s`."""
    run = SteppedRun(open_run(1, 2, start_timeout_s=0.0, **policy))
    run.join("w0")
    run.form()
    run.join("w1")
    run.pause()
    run.form(takes_s=pause_s)
    assert run.core.state.live.members() == ("w0", "w1")
    return run


def test_duration_of_a_planned_pause_is_measured() -> None:
    assert make_training_run(pause_s=3.0).core.state.growth.pauses_s == [3.0]


def replace_member(run: SteppedRun, worker: str) -> list[Command]:
    """Lose a member, let the other go on, and let the replacement join."""
    run.lose(worker)
    run.form()
    return run.join(f"w{run.core.state.membership.next_worker - 1}")


def is_pausing(run: SteppedRun) -> bool:
    return isinstance(run.core.state.phase, Pausing)


def test_growth_that_pays_pauses_the_run_at_once() -> None:
    """The growth halves the step time, and earlier losses do not shorten its expected use."""
    run = make_training_run(pause_s=3.0)
    replace_member(run, "w1")
    assert is_pausing(run)


def test_growth_waits_until_members_have_stayed_long_enough() -> None:
    """A pause of 3 s halves the step time: it pays if all members stay for 6 s."""
    run = make_training_run(pause_s=3.0)
    replace_member(run, "w1")
    run.pause()
    run.form(takes_s=3.0)
    replace_member(run, "w2")
    first_loss_at, second_loss_at = run.core.state.membership.changes_at
    assert second_loss_at - first_loss_at < 6.0
    assert not is_pausing(run)
    run.wake()
    assert is_pausing(run) and run.now == second_loss_at + 6.0


def test_growth_that_does_not_pay_within_the_horizon_is_not_made() -> None:
    run = make_training_run(pause_s=3.0, growth_horizon_s=5.0)
    replace_member(run, "w1")
    run.commit(50)
    assert run.core.state.live.members() == ("w0",) and not is_pausing(run)


def test_unneeded_standby_workers_are_stopped_and_started_again_after_a_loss() -> None:
    run = SteppedRun(open_run(1, 3, standby_timeout_s=60.0, growth_horizon_s=1e9))
    run.core.state.job = Job(2, steps=10_000)  # a third worker would have nothing to do
    run.join("w0", "w1", "w2")
    run.form()
    assert run.core.state.live.members() == ("w0", "w1")
    run.commit(110)
    assert "w2" in run.core.state.membership.records
    run.now += 10.0
    [stop] = run.deliver(Woke())
    assert stop == StopWorker("w2", "it was on standby for 60 s")
    assert run.deliver(WorkerLost("w2", "stopped")) == []
    run.commit(10)
    assert run.core.state.membership.records.keys() == {"w0", "w1"}
    run.lose("w1")
    run.form()
    assert sorted(run.core.state.membership.records) == ["w0", "w3", "w4"], (
        "all workers are requested again"
    )


def test_gang_below_its_minimum_returns_its_workers_and_requests_them_again() -> None:
    run = SteppedRun(open_run(3, 3, gang_timeout_s=100.0, gang_jitter=0.5))
    run.join("w0", "w1")
    run.now += 140.0
    assert run.deliver(Woke()) == []
    run.now += 20.0
    *stops, waited = run.deliver(Woke())
    cause = "too few other workers arrived"
    assert stops == [StopWorker(worker, cause) for worker in ("w0", "w1", "w2")]
    assert isinstance(waited, Waited) and waited.reason.startswith("3 workers were not available")
    run.deliver(*(WorkerLost(worker, "stopped") for worker in ("w0", "w1", "w2")))
    requested_at = run.now + 45.0
    [start, *_] = run.wake()
    assert start == StartWorkers(("w3", "w4", "w5")) and run.now == requested_at
    assert run.core.state.membership.num_start_failures == 0
    run.join("w3", "w4", "w5")
    assert isinstance(run.core.state.phase, Forming)


def test_gang_with_unsaved_state_is_not_returned() -> None:
    """The live workers hold a newer step than storage."""
    run = make_training_run(gang_timeout_s=100.0)
    run.core.state.policy = replace(run.core.state.policy, min_workers=2)
    run.lose("w1")
    assert isinstance(run.core.state.phase, Waiting)
    assert return_deadline(run.core.state) == inf
