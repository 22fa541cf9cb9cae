"""Hangs of a worker that is the only holder of the state, and exceptions together with losses."""

from __future__ import annotations

from math import inf

import pytest
from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Abort, Command, Form, Reshard, StopWorker
from elastic.protocol.events import (
    Event,
    GroupFormed,
    Quiesced,
    RunOpened,
    Saved,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreReady,
    Woke,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from elastic.protocol.phases import Aborting, Ended, Forming, Saving
from elastic.protocol.votes import StepRecord, Vote


class SteppedCore:
    """A core with the default policy and its own clock."""

    def __init__(
        self,
        num_workers: int,
        saved: tuple[Saved, ...] = (),
        job: Job | None = None,
        layout: str = "",
    ) -> None:
        self.core, self.now = Core(), 0.0
        policy = users_policy(1, num_workers)
        job = job or Job(max(8, num_workers), steps=1000)
        self.deliver(RunOpened(1, policy, TargetLayout.parse(layout, num_workers), job, saved))
        self.deliver(StoreReady("host", 1))
        self.workers = [f"w{i}" for i in range(num_workers)]
        self.deliver(*(WorkerReady(worker, "node", 1) for worker in self.workers))
        self.form()

    def deliver(self, *events: Event) -> list[Command]:
        return [command for event in events for command in self.core.step(self.now, event)]

    def form(self) -> None:
        generation = self.core.state.generation
        self.deliver(*(GroupFormed(worker, generation) for worker in self.workers))
        self.deliver(*(StateReady(w, generation, 0, 0, 0.0, 1, 1, 2) for w in self.workers))

    def commit(self, step: int) -> None:
        generation, num = self.core.state.generation, len(self.workers)
        record = StepRecord(0.0, step, generation, num, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
        self.now += 0.5
        self.deliver(StepCommitted(generation, record, Vote(step, 1.0, 1, 1.0, num)))

    def wake(self) -> list[Command]:
        """Advance the clock to the next deadline of the core."""
        deadline = self.core.next_deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.deliver(Woke())

    def play(self, reports: list[tuple[float, Event]]) -> dict[str, float]:
        """Deliver reports at their times and wake the core at its deadlines before them.

        Returns the time at which each worker was ended."""
        ended_at: dict[str, float] = {}
        for time, event in [*sorted(reports, key=lambda report: report[0]), (inf, Woke())]:
            while (deadline := self.core.next_deadline()) is not None and deadline < time:
                if not isinstance(self.core.state.phase, Aborting):
                    break
                commands = self.wake()
                ended_at.update({c.worker: self.now for c in commands if isinstance(c, StopWorker)})
            if time < inf:
                self.now = max(self.now, time)
                self.deliver(event)
        return ended_at

    def unwind(self, worker: str, after_s: float) -> tuple[float, Event]:
        state = self.core.state
        return self.now + after_s, Quiesced(worker, state.generation, state.committed_step)

    def wake_until(self, kind: type[Command]) -> Command:  # type: ignore[valid-type]
        for _ in range(10):
            for command in self.wake():
                if isinstance(command, kind):
                    return command
        raise AssertionError(f"no {kind}")


def commit_steps(stepped: SteppedCore, *steps: int) -> SteppedCore:
    for step in steps:
        stepped.commit(step)
    return stepped


def test_hanging_only_holder_is_replaced_from_the_checkpoint() -> None:
    stepped = commit_steps(SteppedCore(1, (Saved(5, 1, "checkpoint"),)), 6, 7, 8)
    started = stepped.now
    abort = stepped.wake_until(Abort)
    assert isinstance(abort, Abort) and abort.is_hang
    assert stepped.now - started == pytest.approx(stepped.core.state.policy.hang_timeout_s)
    stepped.wake_until(StopWorker)
    assert stepped.now - started < 70.0, "without waiting 300 s for a collective"
    stepped.deliver(WorkerLost("w0", "killed"), WorkerReady("w1", "node", 1))
    stepped.wake_until(Form) if not isinstance(stepped.core.state.phase, Forming) else None
    stepped.deliver(GroupFormed("w1", stepped.core.state.generation))
    assert stepped.core.state.committed_step == 5


def test_only_the_hanging_worker_is_ended() -> None:
    """One of eight workers hangs; the healthy ones take up to half a minute to unwind."""
    stepped = commit_steps(SteppedCore(8), 1, 2, 3)
    stepped.wake_until(Abort)
    started = stepped.now
    unwound_s = (0.2, 29.0, 16.0, 30.0, 29.5, 17.0, 28.0)
    ended_at = stepped.play([stepped.unwind(f"w{i}", s) for i, s in enumerate(unwound_s)])
    policy = stepped.core.state.policy
    extra_s = max(policy.hang_share * policy.hang_timeout_s, 4.0 * max(unwound_s))
    assert ended_at == {"w7": pytest.approx(started + 30.0 + extra_s)}
    assert isinstance(stepped.core.state.phase, Forming)


def test_late_forming_ends_no_healthy_worker() -> None:
    """One of eight dies; one of the other seven forms in time, and the others unwind later."""
    stepped = commit_steps(SteppedCore(8), 1, 2, 3)
    stepped.deliver(WorkerLost("w7", "killed"))
    stepped.play([stepped.unwind(f"w{i}", 0.1) for i in range(7)])
    stepped.deliver(GroupFormed("w0", stepped.core.state.generation))
    abort = stepped.wake_until(Abort)
    assert isinstance(abort, Abort) and "Forming timed out" in abort.cause and not abort.is_hang
    unwound_s = (0.2, 20.0, 70.0, 100.0, 101.0, 150.0, 250.0)
    ended_at = stepped.play([stepped.unwind(f"w{i}", s) for i, s in enumerate(unwound_s)])
    assert not ended_at
    assert isinstance(stepped.core.state.phase, Forming)


def test_hanging_only_holder_without_a_checkpoint_gets_the_collective_timeout() -> None:
    stepped = commit_steps(SteppedCore(1), 1, 2, 3)
    stepped.wake_until(Abort)
    started = stepped.now
    stepped.wake_until(StopWorker)
    assert stepped.now - started == pytest.approx(stepped.core.state.policy.collective_timeout_s)


@pytest.mark.parametrize("moment", ["running", "aborting", "waiting"])
def test_signal_ends_the_run_although_the_only_holder_hangs(moment: str) -> None:
    stepped = commit_steps(SteppedCore(1), 1, 2, 3)
    if moment != "running":
        stepped.wake_until(Abort)
    if moment == "waiting":
        stepped.now += 100.0
        stepped.deliver(Woke())
        assert isinstance(stepped.core.state.phase, Aborting)
    started = stepped.now
    stepped.deliver(StopRequested("SIGINT"))
    while not isinstance(stepped.core.state.phase, Ended):
        stepped.wake()
    limit_s = 70.0 if moment == "running" else 5.0
    assert stepped.now - started < limit_s
    assert stepped.core.state.phase.outcome == "interrupted"


def test_signal_ends_the_run_while_the_first_step_hangs() -> None:
    stepped = SteppedCore(1)
    stepped.deliver(StopRequested("SIGINT"))
    while not isinstance(stepped.core.state.phase, Ended):
        stepped.wake()
    assert stepped.now < 70.0, "without waiting 600 s for a compilation"


def test_signal_does_not_wait_for_a_hanging_transfer() -> None:
    stepped = commit_steps(SteppedCore(2), 1, 2)
    stepped.deliver(WorkerLost("w1", "killed"))
    generation = stepped.core.state.generation
    stepped.deliver(Quiesced("w0", generation, 2))
    assert isinstance(stepped.core.state.phase, Forming)
    commands = stepped.deliver(GroupFormed("w0", stepped.core.state.generation))
    assert any(isinstance(command, Reshard) for command in commands)
    [abort] = stepped.deliver(StopRequested("SIGINT"))
    assert isinstance(abort, Abort)
    stepped.deliver(Quiesced("w0", stepped.core.state.generation, 2))
    assert isinstance(stepped.core.state.phase, Saving)


@pytest.mark.parametrize("fate", ["slow", "killed"])
def test_exception_before_losses_ends_the_run(fate: str) -> None:
    stepped = commit_steps(SteppedCore(3), 1, 2)
    generation = stepped.core.state.generation
    stepped.deliver(WorkerRaised("w1", generation, "program", "ValueError: wrong", "Traceback"))
    stepped.deliver(WorkerRaised("w2", generation, "peer", "a broken connection"))
    stepped.deliver(Quiesced("w1", generation, 2), Quiesced("w2", generation, 2))
    if fate == "slow":
        stepped.wake_until(StopWorker)
    stepped.deliver(WorkerLost("w0", "killed"))
    assert isinstance(stepped.core.state.phase, Saving)
    ending = stepped.core.state.ending
    assert ending and (ending.outcome, ending.traceback) == ("failed", "Traceback")


def test_exception_reported_after_its_consequences_is_the_cause() -> None:
    stepped = commit_steps(SteppedCore(2), 1, 2)
    generation = stepped.core.state.generation
    stepped.deliver(WorkerRaised("w1", generation, "peer", "a broken connection"))
    stepped.deliver(WorkerRaised("w0", generation, "program", "ValueError: wrong", "Traceback"))
    stepped.deliver(Quiesced("w0", generation, 2), Quiesced("w1", generation, 2))
    assert stepped.core.state.ending and "ValueError" in stepped.core.state.ending.reason


def test_exception_after_a_loss_does_not_end_the_run() -> None:
    stepped = commit_steps(SteppedCore(2), 1, 2)
    generation = stepped.core.state.generation
    stepped.deliver(WorkerLost("w1", "killed"))
    stepped.deliver(WorkerRaised("w0", generation, "program", "ValueError: wrong", "Traceback"))
    stepped.deliver(Quiesced("w0", generation, 2))
    assert stepped.core.state.ending is None
