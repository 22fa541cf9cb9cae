"""A run that starts with few workers: how long it waits, and how it grows in rounds."""

from __future__ import annotations

from test_core import ready_event
from test_growth import SteppedRun
from users_policy import users_policy

from elastic.controller.capacity.next_assignment import reshard_timeout_s
from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, Form
from elastic.protocol.events import (
    Event,
    GroupFormed,
    Quiesced,
    RunOpened,
    StateReady,
    StoreReady,
    WorkerLost,
)
from elastic.protocol.notes import Waited
from elastic.protocol.phases import Aborting, Forming, Resharding, Running, Waiting

NUM_WORKERS = 100
STATE_BYTES = 10**9


class RecordedRun(SteppedRun):
    """It remembers the commands of the core."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.said: list[Command] = []

    def deliver(self, *events: Event) -> list[Command]:
        said = super().deliver(*events)
        self.said += said
        return said


def opened_run(layout: str = "", min_workers: int = 1, **policy: float) -> RecordedRun:
    """A run of a hundred workers whose store is ready."""
    core = Core()
    job = Job(NUM_WORKERS, state_bytes=STATE_BYTES, steps=1000)
    target = TargetLayout.parse(layout, NUM_WORKERS)
    settings = users_policy(min_workers, NUM_WORKERS, **policy)  # type: ignore[arg-type]
    core.step(0.0, RunOpened(1, settings, target, job))
    core.step(0.0, StoreReady("host", 1))
    return RecordedRun(core)


def grown_from(num_members: int, layout: str = "", **policy: float) -> RecordedRun:
    """A run that has started with a few workers and pauses to let all others join."""
    run = opened_run(layout, start_timeout_s=0.0, gang_timeout_s=0.0, **policy)
    run.join(*(f"w{i}" for i in range(num_members)))
    if not isinstance(run.core.state.phase, Waiting):
        run.form()
    run.join(*(f"w{i}" for i in range(num_members, NUM_WORKERS)))
    return run


def reshard(run: SteppedRun, seconds: float = 0.0) -> None:
    """Form the groups, move the state of each worker that joins in `seconds`, commit a step."""
    state = run.core.state
    before, generation = set(state.live.members()), state.generation
    assert isinstance(state.phase, Forming)
    participants = state.phase.attempt.plan.participants
    run.deliver(*(GroupFormed(worker, generation) for worker in participants))
    for worker in participants:
        moved = 0 if worker in before else STATE_BYTES
        run.deliver(StateReady(worker, generation, moved, moved, seconds, 1, 1, 2))
    run.commit()


def num_members(run: SteppedRun) -> int:
    return len(run.core.state.live.members())


def test_one_member_sends_the_state_a_few_times_in_each_round() -> None:
    run = grown_from(1)
    run.pause()
    phase = run.core.state.phase
    assert isinstance(phase, Forming)
    first = phase.attempt.assignment
    assert len(first.members) == 1 + 8
    assert len(first.standbys) == NUM_WORKERS - 9
    reshard(run)
    run.pause()
    reshard(run)
    assert num_members(run) == 9 * (1 + 8)
    run.pause()
    reshard(run)
    assert num_members(run) == NUM_WORKERS


def test_journal_says_why_workers_join_later() -> None:
    run = grown_from(1)
    run.pause()
    (form,) = [command for command in run.said if isinstance(command, Form)][1:]
    assert form.reason.endswith(
        "; 91 workers join in later rounds, so that no member sends the state more than 8 times"
    )


def test_measured_speed_decides_how_many_join() -> None:
    run = grown_from(1, reshard_timeout_s=100.0)
    run.pause()
    reshard(run, seconds=20.0)  # 8 copies: a member sends 20 in half of the time limit
    run.pause()
    reshard(run)
    assert num_members(run) == NUM_WORKERS

    slow = grown_from(1, reshard_timeout_s=100.0)
    slow.pause()
    reshard(slow, seconds=80.0)  # only 5 in that time
    slow.pause()
    reshard(slow)
    assert num_members(slow) == 9 * (1 + 5)


def test_reshard_that_exceeds_its_time_is_tried_with_half_as_many() -> None:
    run = grown_from(1, reshard_timeout_s=100.0)
    run.pause()
    state = run.core.state
    assert isinstance(state.phase, Forming)
    participants = state.phase.attempt.plan.participants
    run.deliver(*(GroupFormed(worker, state.generation) for worker in participants))
    assert isinstance(state.phase, Resharding)
    run.wake()
    assert isinstance(state.phase, Aborting)
    run.deliver(*(Quiesced(w, state.generation, 1) for w in participants))
    assert isinstance(state.phase, Forming)
    assert len(state.phase.attempt.assignment.members) == 1 + 4


def test_shards_are_not_held_back() -> None:
    """Each worker that joins receives a hundredth of the state: a member sends it once."""
    run = grown_from(1, layout="fsdp=100")
    run.pause()
    reshard(run)
    assert num_members(run) == NUM_WORKERS


def test_minimum_that_one_round_cannot_reach_gets_more_time() -> None:
    run = opened_run(min_workers=60, start_timeout_s=0.0)
    run.join(*(f"w{i}" for i in range(60)))
    run.form()
    run.deliver(*(WorkerLost(f"w{i}", "killed") for i in range(1, 60)))
    state = run.core.state
    run.deliver(Quiesced("w0", state.generation, state.committed_step))
    state.forming.sent_bytes_per_s = STATE_BYTES / 20.0
    joining = [worker for worker in state.membership.records if worker != "w0"]
    run.join(*joining)
    phase = state.phase
    assert isinstance(phase, Forming)
    num_joining = len(phase.attempt.assignment.members) - 1
    assert num_joining >= 59
    participants = phase.attempt.plan.participants
    run.deliver(*(GroupFormed(worker, state.generation) for worker in participants))
    assert isinstance(state.phase, Resharding)
    assert state.phase.deadline - run.now == 2 * 20.0 * num_joining


def test_one_worker_that_joins_many_says_nothing_about_their_speed() -> None:
    run = opened_run(min_workers=NUM_WORKERS - 1, start_timeout_s=0.0)
    run.join(*(f"w{i}" for i in range(NUM_WORKERS - 1)))
    run.form()
    run.join(f"w{NUM_WORKERS - 1}")
    run.pause()
    reshard(run, seconds=20.0)
    assert num_members(run) == NUM_WORKERS
    state = run.core.state
    assert state.forming.sent_bytes_per_s == 0
    held = state.live.held
    assert held is not None
    limit_s = reshard_timeout_s(state, held.assignment, held.assignment)
    assert limit_s == state.policy.reshard_timeout_s


def test_time_of_a_reshard_is_bounded_however_slow_members_were() -> None:
    run = grown_from(1, reshard_timeout_s=100.0)
    run.pause()
    phase, state = run.core.state.phase, run.core.state
    assert isinstance(phase, Forming)
    state.forming.sent_bytes_per_s = 1.0
    previous = phase.attempt.plan.old
    assert reshard_timeout_s(state, previous, phase.attempt.assignment) == 10 * 100.0


def test_live_reshard_in_time_ends_the_caution_after_late_ones() -> None:
    run = grown_from(1)
    run.core.state.forming.num_late_reshards = 3
    run.pause()
    reshard(run)
    assert num_members(run) == 1 + 1
    assert run.core.state.forming.num_late_reshards == 0


def test_start_waits_while_workers_keep_arriving() -> None:
    run = opened_run(start_timeout_s=60.0)
    waits: list[str] = []
    for number in range(40):
        run.now = 5.0 * number + 1.0
        said = run.join(f"w{number}")
        waits += [command.reason for command in said if isinstance(command, Waited)]
        if not isinstance(run.core.state.phase, Waiting):
            break
    assert "growth.start_timeout_s has passed, but others keep arriving" in waits[-1]
    assert run.now == 121.0, "it starts at the latest after twice the time"


def test_start_does_not_wait_without_arrivals_or_once_most_are_ready() -> None:
    run = opened_run(start_timeout_s=60.0)
    run.join("w0")
    run.wake()
    assert run.now == 60.0
    assert not isinstance(run.core.state.phase, Waiting)

    most = opened_run(start_timeout_s=60.0)
    most.now = 59.0
    most.deliver(*(ready_event(f"w{i}") for i in range(NUM_WORKERS // 2)))
    most.wake()
    assert most.now == 60.0
    assert not isinstance(most.core.state.phase, Waiting | Running)
