"""A worker that hangs while it alone holds the state, and exceptions beside losses."""

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


class Driven:
    """A core with the policy that users get, and its time."""

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
        self.tell(RunOpened(1, policy, TargetLayout.parse(layout, num_workers), job, saved))
        self.tell(StoreReady("host", 1))
        self.workers = [f"w{i}" for i in range(num_workers)]
        self.tell(*(WorkerReady(worker, "node", 1) for worker in self.workers))
        self.form()

    def tell(self, *events: Event) -> list[Command]:
        return [command for event in events for command in self.core.step(self.now, event)]

    def form(self) -> None:
        generation = self.core.state.generation
        self.tell(*(GroupFormed(worker, generation) for worker in self.workers))
        self.tell(*(StateReady(w, generation, 0, 0, 0.0, 1, 1, 2) for w in self.workers))

    def commit(self, step: int) -> None:
        generation, num = self.core.state.generation, len(self.workers)
        record = StepRecord(0.0, step, generation, num, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
        self.now += 0.5
        self.tell(StepCommitted(generation, record, Vote(step, 1.0, 1, 1.0, num)))

    def wake(self) -> list[Command]:
        """At the core's next deadline."""
        deadline = self.core.next_deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.tell(Woke())

    def play(self, reports: list[tuple[float, Event]]) -> dict[str, float]:
        """Reports come at their times, and the core wakes whenever it wants to before them. Returns
        when each worker was ended."""
        ended: dict[str, float] = {}
        for time, event in [*sorted(reports, key=lambda report: report[0]), (inf, Woke())]:
            while (deadline := self.core.next_deadline()) is not None and deadline < time:
                if not isinstance(self.core.state.phase, Aborting):
                    break
                commands = self.wake()
                ended.update({c.worker: self.now for c in commands if isinstance(c, StopWorker)})
            if time < inf:
                self.now = max(self.now, time)
                self.tell(event)
        return ended

    def unwind(self, worker: str, after_s: float) -> tuple[float, Event]:
        state = self.core.state
        return self.now + after_s, Quiesced(worker, state.generation, state.committed_step)

    def wake_until(self, kind: type[Command]) -> Command:  # type: ignore[valid-type]
        for _ in range(10):
            for command in self.wake():
                if isinstance(command, kind):
                    return command
        raise AssertionError(f"no {kind}")


def committed(driven: Driven, *steps: int) -> Driven:
    for step in steps:
        driven.commit(step)
    return driven


def test_a_worker_that_hangs_with_the_whole_state_is_replaced_from_the_checkpoint() -> None:
    driven = committed(Driven(1, (Saved(5, 1, "checkpoint"),)), 6, 7, 8)
    began = driven.now
    abort = driven.wake_until(Abort)
    assert isinstance(abort, Abort) and abort.is_hang
    assert driven.now - began == pytest.approx(driven.core.state.policy.hang_timeout_s)
    driven.wake_until(StopWorker)
    assert driven.now - began < 70.0, "not the 300 s of a collective"
    driven.tell(WorkerLost("w0", "killed"), WorkerReady("w1", "node", 1))
    driven.wake_until(Form) if not isinstance(driven.core.state.phase, Forming) else None
    driven.tell(GroupFormed("w1", driven.core.state.generation))
    assert driven.core.state.committed_step == 5


def test_after_a_hang_only_the_worker_that_hangs_is_ended() -> None:
    """One of eight hangs; the healthy ones take up to half a minute to unwind."""
    driven = committed(Driven(8), 1, 2, 3)
    driven.wake_until(Abort)
    began = driven.now
    unwound_s = (0.2, 29.0, 16.0, 30.0, 29.5, 17.0, 28.0)
    ended = driven.play([driven.unwind(f"w{i}", s) for i, s in enumerate(unwound_s)])
    policy = driven.core.state.policy
    share_s = max(policy.hang_share * policy.hang_timeout_s, 4.0 * max(unwound_s))
    assert ended == {"w7": pytest.approx(began + 30.0 + share_s)}
    assert isinstance(driven.core.state.phase, Forming)


def test_late_forming_ends_no_healthy_worker() -> None:
    """One of eight dies, and one of seven has formed in time; the others unwind later than it."""
    driven = committed(Driven(8), 1, 2, 3)
    driven.tell(WorkerLost("w7", "killed"))
    driven.play([driven.unwind(f"w{i}", 0.1) for i in range(7)])
    driven.tell(GroupFormed("w0", driven.core.state.generation))
    abort = driven.wake_until(Abort)
    assert isinstance(abort, Abort) and "Forming timed out" in abort.cause and not abort.is_hang
    unwound_s = (0.2, 20.0, 70.0, 100.0, 101.0, 150.0, 250.0)
    ended = driven.play([driven.unwind(f"w{i}", s) for i, s in enumerate(unwound_s)])
    assert not ended
    assert isinstance(driven.core.state.phase, Forming)


def test_without_anything_to_go_on_from_it_is_waited_for() -> None:
    driven = committed(Driven(1), 1, 2, 3)
    driven.wake_until(Abort)
    began = driven.now
    driven.wake_until(StopWorker)
    assert driven.now - began == pytest.approx(driven.core.state.policy.collective_timeout_s)


@pytest.mark.parametrize("moment", ["running", "aborting", "waited for"])
def test_a_signal_is_obeyed_though_the_only_holder_of_the_state_hangs(moment: str) -> None:
    driven = committed(Driven(1), 1, 2, 3)
    if moment != "running":
        driven.wake_until(Abort)
    if moment == "waited for":
        driven.now += 100.0
        driven.tell(Woke())
        assert isinstance(driven.core.state.phase, Aborting)
    began = driven.now
    driven.tell(StopRequested("SIGINT"))
    while not isinstance(driven.core.state.phase, Ended):
        driven.wake()
    limit_s = 70.0 if moment == "running" else 5.0
    assert driven.now - began < limit_s
    assert driven.core.state.phase.outcome == "interrupted"


def test_a_signal_is_obeyed_while_the_first_step_hangs() -> None:
    driven = Driven(1)
    driven.tell(StopRequested("SIGINT"))
    while not isinstance(driven.core.state.phase, Ended):
        driven.wake()
    assert driven.now < 70.0, "not the 600 s that a compilation gets"


def test_a_signal_does_not_wait_for_a_transfer_that_hangs() -> None:
    driven = committed(Driven(2), 1, 2)
    driven.tell(WorkerLost("w1", "killed"))
    generation = driven.core.state.generation
    driven.tell(Quiesced("w0", generation, 2))
    assert isinstance(driven.core.state.phase, Forming)
    commands = driven.tell(GroupFormed("w0", driven.core.state.generation))
    assert any(isinstance(command, Reshard) for command in commands)
    [abort] = driven.tell(StopRequested("SIGINT"))
    assert isinstance(abort, Abort)
    driven.tell(Quiesced("w0", driven.core.state.generation, 2))
    assert isinstance(driven.core.state.phase, Saving)


@pytest.mark.parametrize("fate", ["slow", "killed"])
def test_an_exception_is_not_swallowed_by_losses_after_it(fate: str) -> None:
    driven = committed(Driven(3), 1, 2)
    generation = driven.core.state.generation
    driven.tell(WorkerRaised("w1", generation, "program", "ValueError: wrong", "Traceback"))
    driven.tell(WorkerRaised("w2", generation, "peer", "a broken connection"))
    driven.tell(Quiesced("w1", generation, 2), Quiesced("w2", generation, 2))
    if fate == "slow":
        driven.wake_until(StopWorker)
    driven.tell(WorkerLost("w0", "killed"))
    assert isinstance(driven.core.state.phase, Saving)
    ending = driven.core.state.ending
    assert ending and (ending.outcome, ending.traceback) == ("failed", "Traceback")


def test_an_exception_after_collateral_of_it_is_the_cause() -> None:
    driven = committed(Driven(2), 1, 2)
    generation = driven.core.state.generation
    driven.tell(WorkerRaised("w1", generation, "peer", "a broken connection"))
    driven.tell(WorkerRaised("w0", generation, "program", "ValueError: wrong", "Traceback"))
    driven.tell(Quiesced("w0", generation, 2), Quiesced("w1", generation, 2))
    assert driven.core.state.ending and "ValueError" in driven.core.state.ending.reason


def test_an_exception_after_a_loss_may_follow_from_it() -> None:
    driven = committed(Driven(2), 1, 2)
    generation = driven.core.state.generation
    driven.tell(WorkerLost("w1", "killed"))
    driven.tell(WorkerRaised("w0", generation, "program", "ValueError: wrong", "Traceback"))
    driven.tell(Quiesced("w0", generation, 2))
    assert driven.core.state.ending is None
