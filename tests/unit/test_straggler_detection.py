"""Who is a straggler, and when it is replaced or told of."""

from __future__ import annotations

import pytest
from test_core import open_run
from test_growth import SteppedRun

from elastic.controller.core import Core
from elastic.controller.stragglers import slowness
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, Form, Pause, Replaced, StopWorker, Warned
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import ComputeTimed, NodeDraining
from elastic.protocol.wire import decode, encode

POLICY = {"straggler_every": 5}


def training(num_workers: int, num_members: int, **policy: float) -> SteppedRun:
    """Under plain replicas; the other workers are spares."""
    life = SteppedRun(open_run(1, num_workers, **POLICY, **policy))
    life.core.state.layouts.target = TargetLayout.parse(f"dp={num_members}", num_workers)
    life.core.state.job = Job(12, steps=10_000)
    life.join(*(f"w{i}" for i in range(num_workers)))
    life.form()
    assert len(life.core.state.live.members()) == num_members
    return life


def deliver(life: SteppedRun, times: dict[str, float], num_reports: int = 1) -> list[Command]:
    """So many reports of how long each member computed; 1 s if nothing is said."""
    commands: list[Command] = []
    for _ in range(num_reports):
        life.commit(5)
        state = life.core.state
        compute_s = tuple(times.get(worker, 1.0) for worker in state.live.members())
        commands += life.deliver(ComputeTimed(state.generation, state.committed_step, compute_s))
    return commands


def test_it_is_compared_with_the_others_that_do_the_same_work() -> None:
    layout = Layout(pp=2, dp=2)
    assert slowness((1.0, 1.0, 9.0, 9.0), layout, 12, 2.0) == {}, "the stages differ"
    assert slowness((1.0, 2.5, 9.0, 9.0), layout, 12, 2.0) == {1: 2.5}
    assert slowness((1.0, 2.0, 9.0, 9.0), layout, 12, 2.0) == {}, "just the factor is not over it"
    assert slowness((1.0, 0.0, 9.0, 0.0), layout, 12, 2.0) == {}, "nothing was timed"


def test_who_has_more_to_do_is_not_slow() -> None:
    """Who has two microbatches of five is not compared with those that have one."""
    assert slowness((2.2, 1.0, 1.0, 1.0), Layout(dp=4), 5, 2.0) == {}
    assert slowness((2.2, 2.2, 1.0), Layout(dp=3), 5, 2.0) == {}


def test_the_slowest_comes_first() -> None:
    assert slowness((1.0, 3.0, 1.0, 1.0, 6.0), Layout(dp=5), 10, 2.0) == {4: 6.0, 1: 3.0}


def test_a_straggler_leaves_at_the_boundary_and_a_spare_takes_its_place() -> None:
    life = training(4, 3)
    assert deliver(life, {"w1": 3.0}, 2) == []
    replaced, pause = deliver(life, {"w1": 3.0})
    told = "it computes 3.0 times as long as the others that do the same work"
    assert replaced == Replaced("w1", told)
    assert pause == Pause(1, ("w0", "w1", "w2"), "members drain")
    state = life.core.state
    life.pause()
    life.form()
    assert state.live.members() == ("w0", "w3", "w2"), "who stays keeps its place"
    assert state.committed_step == 17, "nothing is redone"
    assert "w1" in state.membership.draining and "w4" in state.membership.records, (
        "another is started in its place"
    )


def test_reports_must_follow_one_another() -> None:
    life = training(4, 3)
    for _ in range(5):
        assert deliver(life, {"w1": 3.0}, 2) == []
        assert deliver(life, {}) == []


def test_without_a_spare_it_is_told_of_once_and_replaced_when_there_is_one() -> None:
    life = training(3, 3)
    [warned] = deliver(life, {"w1": 3.0}, 20)
    assert isinstance(warned, Warned) and warned.kind == "straggler"
    assert "w1 on node is a straggler" in warned.text
    life.core.state.layouts.target = TargetLayout.parse("dp=3", 4)
    life.core.state.policy = open_run(1, 4, **POLICY).state.policy
    life.commit()
    life.join("w3")
    commands = deliver(life, {"w1": 3.0})
    assert [c.worker for c in commands if isinstance(c, Replaced)] == ["w1"]


def test_a_spare_that_is_about_to_leave_is_none() -> None:
    life = training(4, 3)
    life.deliver(NodeDraining("other", 1e9))
    life.core.state.membership.records["w3"].node = "other"
    life.core.state.membership.draining.add("w3")
    assert [type(c) for c in deliver(life, {"w1": 3.0}, 3)] == [Warned]


def test_what_a_replacement_does_not_mend_is_tried_ever_more_rarely() -> None:
    """All spares are as slow as the straggler, as on machines of another kind."""
    life, waits = training(4, 3), []
    for _ in range(3):
        num_reports, slow = 0, life.core.state.live.members()[1]
        while not any(isinstance(c, Replaced) for c in deliver(life, {slow: 3.0})):
            num_reports += 1
        waits.append(num_reports + 1)
        life.pause()
        life.form()
        life.join(f"w{life.core.state.membership.next_worker - 1}")
    assert waits == [3, 6, 12]


def test_a_report_of_another_generation_or_told_again_changes_nothing() -> None:
    life = training(4, 3)
    deliver(life, {"w1": 3.0})
    before = encode(life.core.state)
    state = life.core.state
    for generation, step in ((state.generation - 1, 99), (state.generation, state.committed_step)):
        assert life.deliver(ComputeTimed(generation, step, (1.0, 3.0, 1.0))) == []
    assert encode(life.core.state) == before


def test_what_was_counted_outlives_a_controller() -> None:
    life = training(4, 3)
    deliver(life, {"w1": 3.0}, 2)
    again = SteppedRun(Core(decode(ControllerState, encode(life.core.state))))
    again.now = life.now
    assert [type(c) for c in deliver(again, {"w1": 3.0})] == [Replaced, Pause]


@pytest.mark.parametrize("least", [3, 4])
def test_the_minimum_is_kept(least: int) -> None:
    life = training(4, 3)
    life.core.state.policy = open_run(least, 4, **POLICY).state.policy
    commands = deliver(life, {"w1": 3.0}, 3)
    assert any(isinstance(c, Replaced) for c in commands) == (least == 3)
    assert not any(isinstance(c, Form | StopWorker) for c in commands)
