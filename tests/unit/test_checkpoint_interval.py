"""With `checkpoint.every=auto` the interval follows the measured cost and observed failures."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.planner.checkpoint_interval import (
    FIRST_COST_S,
    PRIOR_S,
    CheckpointCosts,
    best_interval_s,
)
from elastic.protocol.commands import (
    Command,
    Pause,
    PublishCheckpoint,
    RequestCheckpoint,
    StartWorkers,
)
from elastic.protocol.controller_events import ControllerRestarted
from elastic.protocol.events import (
    Checkpointed,
    Event,
    GroupFormed,
    NodeAtRisk,
    NodeDraining,
    PartFile,
    PartWritten,
    RunOpened,
    StateReady,
    StepCommitted,
    StoreReady,
    Woke,
    WorkerLost,
    WorkerReady,
)
from elastic.protocol.notes import Warned
from elastic.protocol.policy import Policy
from elastic.protocol.votes import StepRecord, Vote

WORKERS = ("w0", "w1")
MIN_INTERVAL_S, MAX_INTERVAL_S = 60.0, 900.0
AUTO = users_policy(1, 2)
OFF = users_policy(1, 2, checkpoint_auto=False)
TIMED = users_policy(1, 2, checkpoint_auto=False, checkpoint_every_s=600.0)


@pytest.mark.parametrize(
    ("cost_s", "between_s"), [(0.1, 3600.0), (1.0, 86400.0), (30.0, 10800.0), (600.0, 86400.0)]
)
def test_best_interval_minimizes_the_expected_loss_of_time(cost_s: float, between_s: float) -> None:
    """A search confirms it: each period costs one write, each failure half a period."""

    def expected_loss(interval_s: float) -> float:
        return cost_s / interval_s + (interval_s + cost_s) / (2.0 * between_s)

    best = best_interval_s(cost_s, between_s)
    assert best == pytest.approx(sqrt(2.0 * cost_s * between_s), rel=0.15)
    assert expected_loss(best) <= 1.01 * min(
        expected_loss(best * 1.05**power) for power in range(-60, 60)
    )


def test_interval_never_exceeds_the_time_between_failures() -> None:
    assert best_interval_s(500.0, 100.0) == 100.0


def make_costs(cost_s: float, trained_s: float = 0.0, num_failures: int = 0) -> CheckpointCosts:
    return CheckpointCosts(trained_s, num_failures, costs_s=[cost_s] if cost_s else [])


def test_interval_follows_cost_and_failures_within_its_bounds() -> None:
    day = PRIOR_S
    table = [
        (make_costs(0.0), best_interval_s(FIRST_COST_S, day)),
        (make_costs(0.2), best_interval_s(0.2, day)),
        (make_costs(20.0), MAX_INTERVAL_S),
        (make_costs(0.001), MIN_INTERVAL_S),
        (make_costs(1.0, day, 49), best_interval_s(1.0, day / 25)),
    ]
    for costs, expected in table:
        assert costs.interval_s(MIN_INTERVAL_S, MAX_INTERVAL_S) == pytest.approx(expected)
    assert 400.0 < make_costs(0.0).interval_s(MIN_INTERVAL_S, MAX_INTERVAL_S) < 420.0, (
        "the first interval of a run"
    )


def test_cost_is_the_extra_step_time_while_a_checkpoint_is_written() -> None:
    costs = CheckpointCosts()
    costs.note_step(5.0, 1.0, is_writing=False)
    assert costs.costs_s == [], "no worker was writing"
    costs.begin()
    for step_s in (1.5, 0.9, 1.2):
        costs.note_step(step_s, 1.0, is_writing=True)
    costs.note_step(1.0, 1.0, is_writing=False)
    assert costs.costs_s == [pytest.approx(0.6)]
    costs.begin()
    costs.note_step(9.0, 1.0, is_writing=True)
    costs.forget()
    costs.note_step(9.0, 1.0, is_writing=False)
    assert len(costs.costs_s) == 1, "a failed checkpoint does not count"
    assert costs.trained_s == pytest.approx(5.0 + 1.5 + 0.9 + 1.2 + 1.0 + 9.0 + 9.0)


def test_losses_of_one_generation_are_one_failure() -> None:
    costs = CheckpointCosts()
    for generation in (1, 1, 2, 2, 2):
        costs.note_failure(generation)
    assert costs.num_failures == 2


def deliver(core: Core, now: float, *events: Event) -> list[Command]:
    return [command for event in events for command in core.step(now, event)]


def commit_event(step: int, generation: int = 1, num_save_requests: int = 0) -> StepCommitted:
    record = StepRecord(0.0, step, generation, 2, 1.0, 1, 0.1, 1.0, 1.0, skipped=False)
    return StepCommitted(
        generation, record, Vote(step, 1.0, 1, 1.0, 2, num_save_requests=num_save_requests)
    )


def make_training_core(policy: Policy = AUTO, core: Core | None = None) -> Core:
    """Two workers on two nodes have committed a step at time 1."""
    core = core or Core()
    job = Job(8, steps=10**6)
    generation = core.state.generation + 1
    deliver(
        core, 0.0, RunOpened(1, policy, TargetLayout.parse("dp=2", 2), job), StoreReady("host", 1)
    )
    names = sorted(core.state.membership.records)
    deliver(core, 0.0, *(WorkerReady(name, f"node-{name}", 1) for name in names))
    deliver(core, 0.0, *(GroupFormed(name, generation) for name in names))
    deliver(core, 0.0, *(StateReady(n, generation, 0, 0, 0.0, 1, 1, 2) for n in names))
    deliver(core, 1.0, commit_event(1, generation))
    return core


def save_requests_in(commands: list[Command]) -> list[RequestCheckpoint]:
    return [command for command in commands if isinstance(command, RequestCheckpoint)]


def test_run_requests_a_checkpoint_after_the_first_interval() -> None:
    core = make_training_core()
    first = core.state.checkpoints.save_at
    assert first is not None and 400.0 < first < 420.0
    assert not save_requests_in(deliver(core, first - 1.0, commit_event(2)))
    assert save_requests_in(deliver(core, first, Woke()))
    deliver(core, first + 1.0, commit_event(3, num_save_requests=2))
    file = PartFile("part", 1, 0)
    deliver(core, first + 2.0, *(PartWritten(w, 1, 3, file) for w in WORKERS))
    assert core.state.checkpoints.save_at == pytest.approx(2 * first + 1.0, abs=2.0)


@pytest.mark.parametrize("notice", [NodeDraining("node-w1", 500.0), NodeAtRisk("node-w1", "spot")])
@pytest.mark.parametrize(
    ("policy", "is_saving"),
    [(AUTO, True), (TIMED, True), (OFF, False)],
)
def test_notice_requests_a_checkpoint_at_once_unless_they_are_off(
    notice: Event, policy: Policy, is_saving: bool
) -> None:
    core = make_training_core(policy)
    deliver(core, 5.0, notice)
    assert (core.state.checkpoints.save_at == 5.0) == is_saving


def test_checkpoint_that_fails_with_a_worker_is_requested_again_at_once() -> None:
    """Waiting a whole interval would mean no checkpoint at all under frequent losses."""
    core = make_training_core()
    first = core.state.checkpoints.save_at
    assert first is not None
    deliver(core, first - 1.0, commit_event(2))
    assert save_requests_in(deliver(core, first, Woke()))
    deliver(core, first + 1.0, commit_event(3, num_save_requests=2))
    deliver(core, first + 2.0, WorkerLost("w1", "killed"))
    assert core.state.checkpoints.save_at == first + 2.0


def test_lost_session_counts_as_a_failure_and_keeps_its_measurements() -> None:
    core = make_training_core()
    core.state.checkpoints.costs.costs_s = [0.5]
    assert core.state.checkpoints.costs.num_failures == 0
    resumed = make_training_core(core=core)
    assert resumed.state.checkpoints.costs.num_failures == 1
    assert resumed.state.checkpoints.costs.costs_s == [0.5]


def warnings_in(commands: list[Command]) -> list[Warned]:
    return [command for command in commands if isinstance(command, Warned)]


def commit_with_writers(
    core: Core, now: float, step_number: int, num_writing: int
) -> list[Command]:
    """Commit a step whose vote says that `num_writing` members still write."""
    event = commit_event(step_number, core.state.generation)
    vote = replace(event.vote, num_writing=num_writing)
    return deliver(core, now, replace(event, vote=vote), Woke())


def make_core_with_a_missing_part(policy: Policy = AUTO) -> tuple[Core, float]:
    """The checkpoint lacks the part of w1; returned with the time at which it began."""
    core = make_training_core(policy)
    core.state.checkpoints.save_at = 10.0
    assert save_requests_in(deliver(core, 10.0, Woke()))
    deliver(core, 20.0, commit_event(2, num_save_requests=2))
    deliver(core, 22.0, PartWritten("w0", 1, 2, PartFile("part-w0", 1, 0)))
    return core, 20.0


def test_lost_report_of_a_part_makes_the_checkpoint_again() -> None:
    """The votes say that no worker writes any more, so the controller requests it again."""
    core, upload_began_at = make_core_with_a_missing_part()
    deadline = upload_began_at + core.state.policy.save_timeout_s
    assert not save_requests_in(commit_with_writers(core, deadline - 0.1, 3, num_writing=0))
    assert core.next_deadline() is not None and core.next_deadline() <= deadline
    commands = deliver(core, deadline, Woke())
    [warned] = warnings_in(commands)
    assert warned.kind == "checkpoint" and "w1 on node-w1" in warned.text
    assert save_requests_in(commands) and not core.state.checkpoints.uploads
    assert core.state.membership.draining == set(), "the worker is healthy"


def test_worker_whose_write_hangs_is_drained() -> None:
    core, upload_began_at = make_core_with_a_missing_part()
    deadline = upload_began_at + core.state.policy.save_timeout_s
    commit_with_writers(core, deadline - 0.1, 3, num_writing=1)
    commands = deliver(core, deadline, Woke())
    assert [type(command) for command in commands] == [Warned, Pause]
    assert core.state.membership.draining == {"w1"}


def test_needed_worker_whose_write_hangs_stays_until_its_replacement_is_ready() -> None:
    core, upload_began_at = make_core_with_a_missing_part(replace(AUTO, min_workers=2))
    deadline = upload_began_at + core.state.policy.save_timeout_s
    commit_with_writers(core, deadline - 0.1, 3, num_writing=1)
    commands = deliver(core, deadline, Woke())
    assert [type(command) for command in commands] == [Warned, StartWorkers]
    assert warnings_in(commit_with_writers(core, deadline + 400.0, 4, num_writing=1)), (
        "the write still hangs"
    )
    commands = deliver(core, deadline + 401.0, WorkerReady("w2", "node-w2", 1))
    assert any(isinstance(command, Pause) for command in commands)


def test_write_that_ends_late_cancels_the_drain() -> None:
    core, upload_began_at = make_core_with_a_missing_part(replace(AUTO, min_workers=2))
    deadline = upload_began_at + core.state.policy.save_timeout_s
    commit_with_writers(core, deadline, 3, num_writing=1)
    assert core.state.membership.draining == {"w1"}
    late_part = PartWritten("w1", 1, 2, PartFile("part-w1", 1, 0))
    commands = deliver(core, deadline + 1.0, late_part)
    assert core.state.membership.draining == set() and core.state.checkpoints.late_writers == set()
    assert any(isinstance(command, PublishCheckpoint) for command in commands)


def test_storage_that_does_not_answer_drains_no_worker() -> None:
    core = make_training_core()
    core.state.checkpoints.save_at = 10.0
    deliver(core, 10.0, Woke())
    deliver(core, 20.0, commit_event(2, num_save_requests=2))
    for number in range(3):
        now = 330.0 + 310.0 * number
        [warned] = warnings_in(commit_with_writers(core, now, 3 + number, num_writing=2))
        assert "storage does not answer" in warned.text
    assert core.state.membership.draining == set()


def test_parts_are_late_after_four_times_the_longest_recent_write() -> None:
    core, upload_began_at = make_core_with_a_missing_part()
    deliver(core, upload_began_at + 199.0, commit_event(3))
    deliver(core, upload_began_at + 200.0, PartWritten("w1", 1, 2, PartFile("part-w1", 1, 0)))
    deliver(core, upload_began_at + 201.0, Checkpointed(2, 1, "path"))
    core.state.checkpoints.want_save(upload_began_at + 202.0)
    deliver(core, upload_began_at + 202.0, Woke())
    deliver(core, upload_began_at + 203.0, commit_event(4, num_save_requests=2))
    [upload] = core.state.checkpoints.uploads.values()
    assert upload.deadline - upload.since == 4 * 200.0


def test_deadlines_of_parts_move_by_the_time_without_a_controller() -> None:
    core, upload_began_at = make_core_with_a_missing_part()
    deliver(core, 1022.0, ControllerRestarted(2, 22.0))
    [upload] = core.state.checkpoints.uploads.values()
    assert upload.since == upload_began_at + 1000.0 and upload.deadline == upload.since + 300.0
