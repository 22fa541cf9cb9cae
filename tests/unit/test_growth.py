"""When a run grows, gives spares back, and gives way to others."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from test_core import open_run, ready_event

from elastic.controller.core import Core
from elastic.duties.gang_backoff import return_deadline
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, StartWorkers, StopWorker, Waited
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
from elastic.protocol.phases import Forming, Pausing, Resharding, Running, Waiting
from elastic.protocol.votes import StepRecord, Vote

STEP_S = 0.5


class Life:
    """A run that does as it is told, at a clock of its own."""

    def __init__(self, core: Core) -> None:
        self.core, self.now = core, 1.0

    def tell(self, *events: Event) -> list[Command]:
        return [command for event in events for command in self.core.step(self.now, event)]

    def come(self, *workers: str) -> list[Command]:
        return self.tell(*(ready_event(worker) for worker in workers))

    def wake(self) -> list[Command]:
        """Let the time go by until the core wants to be woken."""
        woken = self.core.next_deadline()
        assert woken is not None
        self.now = max(self.now, woken)
        return self.tell(Woke())

    def form(self, takes_s: float = 0.0) -> None:
        """What is being formed comes to train, and commits a step."""
        generation, phase = self.core.state.generation, self.core.state.phase
        assert isinstance(phase, Forming)
        participants = phase.attempt.plan.participants
        self.now += takes_s
        self.tell(*(GroupFormed(worker, generation) for worker in participants))
        assert isinstance(self.core.state.phase, Resharding)
        self.tell(*(StateReady(w, generation, 0, 0, 0.0, 0, 0, 0) for w in participants))
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
            self.tell(StepCommitted(state.generation, record, vote))

    def pause(self) -> None:
        state = self.core.state
        assert isinstance(state.phase, Pausing)
        told = (Paused(w, state.generation, state.committed_step) for w in state.live.members())
        self.tell(*told)

    def lose(self, worker: str) -> None:
        """The others go on without it."""
        self.tell(WorkerLost(worker, "killed"))
        generation = self.core.state.generation
        step = self.core.state.committed_step
        left = [w for w in self.core.state.live.members() if w != worker]
        self.tell(*(Quiesced(w, generation, step) for w in left))


def training(pause_s: float = 0.0, **policy: float) -> Life:
    """Two workers of up to four, which have once grown from one, with a pause."""
    life = Life(open_run(1, 2, start_timeout_s=0.0, **policy))
    life.come("w0")
    life.form()
    life.come("w1")
    life.pause()
    life.form(takes_s=pause_s)
    assert life.core.state.live.members() == ("w0", "w1")
    return life


def test_how_long_a_planned_pause_was_is_measured() -> None:
    assert training(pause_s=3.0).core.state.growth.pauses_s == [3.0]


def replaced(life: Life, worker: str) -> list[Command]:
    """A member is lost, the other goes on, and a replacement comes once it is started."""
    life.lose(worker)
    life.form()
    return life.come(f"w{life.core.state.membership.next_worker - 1}")


def is_pausing(life: Life) -> bool:
    return isinstance(life.core.state.phase, Pausing)


def test_a_pause_that_pays_is_made_at_once() -> None:
    """Half of each step's time is saved, for as long as the members stay: they were never lost."""
    life = training(pause_s=3.0)
    replaced(life, "w1")
    assert is_pausing(life)


def test_where_members_come_and_go_it_is_waited_until_they_stay() -> None:
    """A pause of 3 s saves half of the time: it is worth it if all stay for 6 s."""
    life = training(pause_s=3.0)
    replaced(life, "w1")
    life.pause()
    life.form(takes_s=3.0)
    replaced(life, "w2")
    lost_first, lost_then = life.core.state.membership.changes_at
    assert lost_then - lost_first < 6.0
    assert not is_pausing(life)
    life.wake()
    assert is_pausing(life) and life.now == lost_then + 6.0


def test_what_does_not_pay_within_the_horizon_is_left_alone() -> None:
    life = training(pause_s=3.0, growth_horizon_s=5.0)
    replaced(life, "w1")
    life.commit(50)
    assert life.core.state.live.members() == ("w0",) and not is_pausing(life)


def test_spares_that_are_of_no_use_are_given_back_until_a_member_is_lost() -> None:
    life = Life(open_run(1, 3, standby_timeout_s=60.0, growth_horizon_s=1e9))
    life.core.state.job = Job(2, steps=10_000)  # a third worker would have nothing to do
    life.come("w0", "w1", "w2")
    life.form()
    assert life.core.state.live.members() == ("w0", "w1")
    life.commit(110)
    assert "w2" in life.core.state.membership.records
    life.now += 10.0
    [given_back] = life.tell(Woke())
    assert given_back == StopWorker("w2", "it was on standby for 60 s")
    assert life.tell(WorkerLost("w2", "stopped")) == []
    life.commit(10)
    assert life.core.state.membership.records.keys() == {"w0", "w1"}
    life.lose("w1")
    life.form()
    assert sorted(life.core.state.membership.records) == ["w0", "w3", "w4"], "all are wanted again"


def test_who_has_too_few_for_long_gives_them_back_and_asks_again() -> None:
    life = Life(open_run(3, 3, gang_timeout_s=100.0, gang_jitter=0.5))
    life.come("w0", "w1")
    life.now += 140.0
    assert life.tell(Woke()) == []
    life.now += 20.0
    *stops, waited = life.tell(Woke())
    cause = "too few other workers arrived"
    assert stops == [StopWorker(worker, cause) for worker in ("w0", "w1", "w2")]
    assert isinstance(waited, Waited) and waited.reason.startswith("3 workers were not available")
    life.tell(*(WorkerLost(worker, "stopped") for worker in ("w0", "w1", "w2")))
    asked_at = life.now + 45.0
    [start, *_] = life.wake()
    assert start == StartWorkers(("w3", "w4", "w5")) and life.now == asked_at
    assert life.core.state.membership.num_start_failures == 0
    life.come("w3", "w4", "w5")
    assert isinstance(life.core.state.phase, Forming)


def test_what_is_not_saved_is_not_given_back() -> None:
    """The living have more than storage has."""
    life = training(gang_timeout_s=100.0)
    life.core.state.policy = replace(life.core.state.policy, min_workers=2)
    life.lose("w1")
    assert isinstance(life.core.state.phase, Waiting)
    assert return_deadline(life.core.state) == inf
