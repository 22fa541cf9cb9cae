"""Stragglers: detection, replacement by a standby worker, warnings."""

from __future__ import annotations

import pytest
from test_core import open_run
from test_growth import SteppedRun

from elastic.controller.core import Core
from elastic.controller.stragglers import slowness
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, Form, Pause, StopWorker
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import ComputeTimed, NodeDraining
from elastic.protocol.notes import Replaced, Warned
from elastic.protocol.wire import decode, encode

POLICY = {"straggler_every": 5, "straggler_reduce": False}


def make_training_run(num_workers: int, num_members: int, **policy: float) -> SteppedRun:
    """`num_members` replicas; the other workers are on standby."""
    run = SteppedRun(open_run(1, num_workers, **POLICY, **policy))
    run.core.state.layouts.target = TargetLayout.parse(f"dp={num_members}", num_workers)
    run.core.state.job = Job(12, steps=10_000)
    run.join(*(f"w{i}" for i in range(num_workers)))
    run.form()
    assert len(run.core.state.live.members()) == num_members
    return run


def report_times(run: SteppedRun, times: dict[str, float], num_reports: int = 1) -> list[Command]:
    """Deliver reports of the compute time of each member: 1 s unless `times` has another."""
    commands: list[Command] = []
    for _ in range(num_reports):
        run.commit(5)
        state = run.core.state
        compute_s = tuple(times.get(worker, 1.0) for worker in state.live.members())
        commands += run.deliver(ComputeTimed(state.generation, state.committed_step, compute_s))
    return commands


def test_slowness_compares_workers_with_the_same_work() -> None:
    layout = Layout(pp=2, dp=2)
    assert slowness((1.0, 1.0, 9.0, 9.0), layout, 12, 2.0) == {}, "stages are not compared"
    assert slowness((1.0, 2.5, 9.0, 9.0), layout, 12, 2.0) == {1: 2.5}
    assert slowness((1.0, 2.0, 9.0, 9.0), layout, 12, 2.0) == {}, (
        "exactly the factor is not above it"
    )
    assert slowness((1.0, 0.0, 9.0, 0.0), layout, 12, 2.0) == {}, "nothing was timed"


def test_worker_with_more_microbatches_is_not_slow() -> None:
    """A worker with two of five microbatches is not compared with those that have one."""
    assert slowness((2.2, 1.0, 1.0, 1.0), Layout(dp=4), 5, 2.0) == {}
    assert slowness((2.2, 2.2, 1.0), Layout(dp=3), 5, 2.0) == {}


def test_slowest_worker_comes_first() -> None:
    assert slowness((1.0, 3.0, 1.0, 1.0, 6.0), Layout(dp=5), 10, 2.0) == {4: 6.0, 1: 3.0}


def test_standby_worker_replaces_a_straggler_at_the_step_boundary() -> None:
    run = make_training_run(4, 3)
    assert report_times(run, {"w1": 3.0}, 2) == []
    replaced, pause = report_times(run, {"w1": 3.0})
    cause = "it computes 3.0 times as long as the others that do the same work"
    assert replaced == Replaced("w1", cause)
    assert pause == Pause(1, ("w0", "w1", "w2"), "members drain")
    state = run.core.state
    run.pause()
    run.form()
    assert state.live.members() == ("w0", "w3", "w2"), "the other members keep their ranks"
    assert state.committed_step == 17, "no step is redone"
    assert "w1" in state.membership.draining and "w4" in state.membership.records, (
        "a new standby worker is started"
    )


def test_only_consecutive_slow_reports_count() -> None:
    run = make_training_run(4, 3)
    for _ in range(5):
        assert report_times(run, {"w1": 3.0}, 2) == []
        assert report_times(run, {}) == []


def test_straggler_without_standby_worker_is_reported_once_and_replaced_later() -> None:
    run = make_training_run(3, 3)
    [warned] = report_times(run, {"w1": 3.0}, 20)
    assert isinstance(warned, Warned) and warned.kind == "straggler"
    assert "w1 on node is a straggler" in warned.text
    run.core.state.layouts.target = TargetLayout.parse("dp=3", 4)
    run.core.state.policy = open_run(1, 4, **POLICY).state.policy
    run.commit()
    run.join("w3")
    commands = report_times(run, {"w1": 3.0})
    assert [c.worker for c in commands if isinstance(c, Replaced)] == ["w1"]


def test_draining_standby_worker_does_not_replace_a_straggler() -> None:
    run = make_training_run(4, 3)
    run.deliver(NodeDraining("other", 1e9))
    run.core.state.membership.records["w3"].node = "other"
    run.core.state.membership.draining.add("w3")
    assert [type(c) for c in report_times(run, {"w1": 3.0}, 3)] == [Warned]


def test_replacements_that_do_not_help_are_made_ever_more_rarely() -> None:
    """All standby workers are as slow as the straggler, as on nodes of another kind."""
    run, waits = make_training_run(4, 3), []
    for _ in range(3):
        num_reports, slow = 0, run.core.state.live.members()[1]
        while not any(isinstance(c, Replaced) for c in report_times(run, {slow: 3.0})):
            num_reports += 1
        waits.append(num_reports + 1)
        run.pause()
        run.form()
        run.join(f"w{run.core.state.membership.next_worker - 1}")
    assert waits == [3, 6, 12]


def test_report_of_another_generation_or_repeated_report_changes_nothing() -> None:
    run = make_training_run(4, 3)
    report_times(run, {"w1": 3.0})
    before = encode(run.core.state)
    state = run.core.state
    for generation, step in ((state.generation - 1, 99), (state.generation, state.committed_step)):
        assert run.deliver(ComputeTimed(generation, step, (1.0, 3.0, 1.0))) == []
    assert encode(run.core.state) == before


def test_straggler_counts_survive_a_restart_of_the_controller() -> None:
    run = make_training_run(4, 3)
    report_times(run, {"w1": 3.0}, 2)
    restarted = SteppedRun(Core(decode(ControllerState, encode(run.core.state))))
    restarted.now = run.now
    assert [type(c) for c in report_times(restarted, {"w1": 3.0})] == [Replaced, Pause]


@pytest.mark.parametrize("min_workers", [3, 4])
def test_straggler_is_replaced_only_above_the_minimum_of_workers(min_workers: int) -> None:
    run = make_training_run(4, 3)
    run.core.state.policy = open_run(min_workers, 4, **POLICY).state.policy
    commands = report_times(run, {"w1": 3.0}, 3)
    assert any(isinstance(c, Replaced) for c in commands) == (min_workers == 3)
    assert not any(isinstance(c, Form | StopWorker) for c in commands)
