"""With `checkpoint.every=auto` the interval follows measured cost and observed failures."""

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
    Warned,
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
from elastic.protocol.policy import Policy
from elastic.protocol.votes import StepRecord, Vote

WORKERS = ("w0", "w1")
LEAST_S, MOST_S = 60.0, 900.0
AUTO = users_policy(1, 2)
OFF = users_policy(1, 2, checkpoint_auto=False)
TIMED = users_policy(1, 2, checkpoint_auto=False, checkpoint_every_s=600.0)


@pytest.mark.parametrize(
    ("cost_s", "between_s"), [(0.1, 3600.0), (1.0, 86400.0), (30.0, 10800.0), (600.0, 86400.0)]
)
def test_the_estimate_loses_the_least_time(cost_s: float, between_s: float) -> None:
    """Against a search over the expected loss: cost a period, and half a period a failure."""

    def lost(interval_s: float) -> float:
        return cost_s / interval_s + (interval_s + cost_s) / (2.0 * between_s)

    best = best_interval_s(cost_s, between_s)
    assert best == pytest.approx(sqrt(2.0 * cost_s * between_s), rel=0.15)
    assert lost(best) <= 1.01 * min(lost(best * 1.05**power) for power in range(-60, 60))


def test_a_cost_over_the_time_between_failures_is_bounded_by_it() -> None:
    assert best_interval_s(500.0, 100.0) == 100.0


def measured(cost_s: float, trained_s: float = 0.0, num_failures: int = 0) -> CheckpointCosts:
    return CheckpointCosts(trained_s, num_failures, costs_s=[cost_s] if cost_s else [])


def test_the_interval_by_cost_and_failures() -> None:
    day = PRIOR_S
    table = [
        (measured(0.0), best_interval_s(FIRST_COST_S, day)),
        (measured(0.2), best_interval_s(0.2, day)),
        (measured(20.0), MOST_S),
        (measured(0.001), LEAST_S),
        (measured(1.0, day, 49), best_interval_s(1.0, day / 25)),
    ]
    for costs, expected in table:
        assert costs.interval_s(LEAST_S, MOST_S) == pytest.approx(expected)
    assert 400.0 < measured(0.0).interval_s(LEAST_S, MOST_S) < 420.0, "the first one of a run"


def test_the_cost_is_what_steps_take_longer_while_one_is_written() -> None:
    costs = CheckpointCosts()
    costs.note_step(5.0, 1.0, is_writing=False)
    assert costs.costs_s == [], "nobody was writing"
    costs.begin()
    for step_s in (1.5, 0.9, 1.2):
        costs.note_step(step_s, 1.0, is_writing=True)
    costs.note_step(1.0, 1.0, is_writing=False)
    assert costs.costs_s == [pytest.approx(0.6)]
    costs.begin()
    costs.note_step(9.0, 1.0, is_writing=True)
    costs.forget()
    costs.note_step(9.0, 1.0, is_writing=False)
    assert len(costs.costs_s) == 1, "one that broke says nothing"
    assert costs.trained_s == pytest.approx(5.0 + 1.5 + 0.9 + 1.2 + 1.0 + 9.0 + 9.0)


def test_losses_of_one_generation_are_one_failure() -> None:
    costs = CheckpointCosts()
    for generation in (1, 1, 2, 2, 2):
        costs.note_failure(generation)
    assert costs.num_failures == 2


def step(core: Core, now: float, *events: Event) -> list[Command]:
    return [command for event in events for command in core.step(now, event)]


def committed(step: int, generation: int = 1, num_save_requests: int = 0) -> StepCommitted:
    record = StepRecord(0.0, step, generation, 2, 1.0, 1, 0.1, 1.0, 1.0, skipped=False)
    return StepCommitted(
        generation, record, Vote(step, 1.0, 1, 1.0, 2, num_save_requests=num_save_requests)
    )


def training(policy: Policy = AUTO, core: Core | None = None) -> Core:
    """Two workers on a node each have committed a step at time 1."""
    core = core or Core()
    job = Job(8, steps=10**6)
    generation = core.state.generation + 1
    step(core, 0.0, RunOpened(1, policy, TargetLayout.parse("dp=2", 2), job), StoreReady("host", 1))
    names = sorted(core.state.membership.records)
    step(core, 0.0, *(WorkerReady(name, f"node-{name}", 1) for name in names))
    step(core, 0.0, *(GroupFormed(name, generation) for name in names))
    step(core, 0.0, *(StateReady(n, generation, 0, 0, 0.0, 1, 1, 2) for n in names))
    step(core, 1.0, committed(1, generation))
    return core


def wishes(commands: list[Command]) -> list[RequestCheckpoint]:
    return [command for command in commands if isinstance(command, RequestCheckpoint)]


def test_a_run_saves_by_itself_after_the_first_interval() -> None:
    core = training()
    first = core.state.checkpoints.save_at
    assert first is not None and 400.0 < first < 420.0
    assert not wishes(step(core, first - 1.0, committed(2)))
    assert wishes(step(core, first, Woke()))
    step(core, first + 1.0, committed(3, num_save_requests=2))
    file = PartFile("part", 1, 0)
    step(core, first + 2.0, *(PartWritten(w, 1, 3, file) for w in WORKERS))
    assert core.state.checkpoints.save_at == pytest.approx(2 * first + 1.0, abs=2.0)


@pytest.mark.parametrize("notice", [NodeDraining("node-w1", 500.0), NodeAtRisk("node-w1", "spot")])
@pytest.mark.parametrize(
    ("policy", "is_saving"),
    [(AUTO, True), (TIMED, True), (OFF, False)],
)
def test_a_notice_saves_at_once_unless_checkpoints_are_off(
    notice: Event, policy: Policy, is_saving: bool
) -> None:
    core = training(policy)
    step(core, 5.0, notice)
    assert (core.state.checkpoints.save_at == 5.0) == is_saving


def test_a_checkpoint_that_breaks_with_a_worker_is_made_again_at_once() -> None:
    """Not a whole interval later: with frequent losses there would never be one."""
    core = training()
    first = core.state.checkpoints.save_at
    assert first is not None
    step(core, first - 1.0, committed(2))
    assert wishes(step(core, first, Woke()))
    step(core, first + 1.0, committed(3, num_save_requests=2))
    step(core, first + 2.0, WorkerLost("w1", "killed"))
    assert core.state.checkpoints.save_at == first + 2.0


def test_a_session_that_was_lost_is_a_failure_and_its_measures_stay() -> None:
    core = training()
    core.state.checkpoints.costs.costs_s = [0.5]
    assert core.state.checkpoints.costs.num_failures == 0
    again = training(core=core)
    assert again.state.checkpoints.costs.num_failures == 1
    assert again.state.checkpoints.costs.costs_s == [0.5]


def warnings(commands: list[Command]) -> list[Warned]:
    return [command for command in commands if isinstance(command, Warned)]


def vote_with(core: Core, now: float, step_number: int, num_writing: int) -> list[Command]:
    """A step commits, by whose vote so many members still write."""
    told = committed(step_number, core.state.generation)
    vote = replace(told.vote, num_writing=num_writing)
    return step(core, now, replace(told, vote=vote), Woke())


def with_one_part_missing(policy: Policy = AUTO) -> tuple[Core, float]:
    """The part of w1 is missing from the checkpoint of step 3, begun at the time returned."""
    core = training(policy)
    core.state.checkpoints.save_at = 10.0
    assert wishes(step(core, 10.0, Woke()))
    step(core, 20.0, committed(2, num_save_requests=2))
    step(core, 22.0, PartWritten("w0", 1, 2, PartFile("part-w0", 1, 0)))
    return core, 20.0


def test_a_lost_report_of_a_part_does_not_end_all_checkpoints() -> None:
    """By the votes nobody writes any more: the checkpoint is made again."""
    core, began = with_one_part_missing()
    deadline = began + core.state.policy.save_timeout_s
    assert not wishes(vote_with(core, deadline - 0.1, 3, num_writing=0))
    assert core.next_deadline() is not None and core.next_deadline() <= deadline
    commands = step(core, deadline, Woke())
    [warned] = warnings(commands)
    assert warned.kind == "checkpoint" and "w1 on node-w1" in warned.text
    assert wishes(commands) and not core.state.checkpoints.uploads
    assert core.state.membership.draining == set(), "it is healthy"


def test_a_worker_whose_write_hangs_leaves_by_plan() -> None:
    core, began = with_one_part_missing()
    deadline = began + core.state.policy.save_timeout_s
    vote_with(core, deadline - 0.1, 3, num_writing=1)
    commands = step(core, deadline, Woke())
    assert [type(command) for command in commands] == [Warned, Pause]
    assert core.state.membership.draining == {"w1"}


def test_a_run_that_cannot_do_without_it_trains_on_until_another_has_come() -> None:
    core, began = with_one_part_missing(replace(AUTO, min_workers=2))
    deadline = began + core.state.policy.save_timeout_s
    vote_with(core, deadline - 0.1, 3, num_writing=1)
    commands = step(core, deadline, Woke())
    assert [type(command) for command in commands] == [Warned, StartWorkers]
    assert warnings(vote_with(core, deadline + 400.0, 4, num_writing=1)), "while it lasts"
    commands = step(core, deadline + 401.0, WorkerReady("w2", "node-w2", 1))
    assert any(isinstance(command, Pause) for command in commands)


def test_a_write_that_comes_to_an_end_after_all_costs_nothing() -> None:
    core, began = with_one_part_missing(replace(AUTO, min_workers=2))
    deadline = began + core.state.policy.save_timeout_s
    vote_with(core, deadline, 3, num_writing=1)
    assert core.state.membership.draining == {"w1"}
    written = PartWritten("w1", 1, 2, PartFile("part-w1", 1, 0))
    commands = step(core, deadline + 1.0, written)
    assert core.state.membership.draining == set() and core.state.checkpoints.late_writers == set()
    assert any(isinstance(command, PublishCheckpoint) for command in commands)


def test_storage_that_answers_nobody_costs_no_worker() -> None:
    core = training()
    core.state.checkpoints.save_at = 10.0
    step(core, 10.0, Woke())
    step(core, 20.0, committed(2, num_save_requests=2))
    for number in range(3):
        now = 330.0 + 310.0 * number
        [warned] = warnings(vote_with(core, now, 3 + number, num_writing=2))
        assert "storage does not answer" in warned.text
    assert core.state.membership.draining == set()


def test_parts_are_late_after_four_times_the_longest_recent_write() -> None:
    core, began = with_one_part_missing()
    step(core, began + 199.0, committed(3))
    step(core, began + 200.0, PartWritten("w1", 1, 2, PartFile("part-w1", 1, 0)))
    step(core, began + 201.0, Checkpointed(2, 1, "path"))
    core.state.checkpoints.want_save(began + 202.0)
    step(core, began + 202.0, Woke())
    step(core, began + 203.0, committed(4, num_save_requests=2))
    [upload] = core.state.checkpoints.uploads.values()
    assert upload.deadline - upload.since == 4 * 200.0


def test_parts_are_not_late_for_the_time_without_a_controller() -> None:
    core, began = with_one_part_missing()
    step(core, 1022.0, ControllerRestarted(2, 22.0))
    [upload] = core.state.checkpoints.uploads.values()
    assert upload.since == began + 1000.0 and upload.deadline == upload.since + 300.0
