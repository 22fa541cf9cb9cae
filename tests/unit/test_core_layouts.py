"""Layout requests: the answer of the core in each phase, and the layout that follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.model_limits import Limits
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, Form, Pause, Resume
from elastic.protocol.events import (
    Event,
    GroupFormed,
    LayoutRequested,
    Paused,
    Quiesced,
    RunOpened,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreReady,
    WorkerLost,
    WorkerReady,
)
from elastic.protocol.notes import LayoutAnswered
from elastic.protocol.phases import (
    Aborting,
    Forming,
    Pausing,
    Phase,
    Resharding,
    Running,
    Saving,
    Waiting,
)
from elastic.protocol.votes import StepRecord, Vote

WORKERS = ("w0", "w1", "w2", "w3")
JOB = Job(8, steps=10, limits=Limits(tp_divides=8, one_stage="this schedule knows one"))


def deliver(core: Core, *events: Event, now: float = 1.0) -> list[Command]:
    return [command for event in events for command in core.step(now, event)]


def request_layout(core: Core, layout: str) -> list[Command]:
    return deliver(core, LayoutRequested("r", TargetLayout.parse(layout)))


def make_waiting() -> Core:
    core = Core()
    target_layout = TargetLayout.parse("dp=4", max_workers=4)
    deliver(core, RunOpened(1, users_policy(2, 4), target_layout, JOB), StoreReady("host", 1))
    return core


def make_forming() -> Core:
    core = make_waiting()
    deliver(core, *(WorkerReady(worker, "node", 1) for worker in WORKERS))
    return core


def make_resharding() -> Core:
    core = make_forming()
    form_all(core)
    return core


def make_running() -> Core:
    core = make_resharding()
    reshard_all(core)
    deliver(core, commit_event(core, 1))
    return core


def make_pausing() -> Core:
    core = make_running()
    request_layout(core, "fsdp=2")
    return core


def make_aborting() -> Core:
    core = make_running()
    deliver(core, WorkerLost("w3", "killed"))
    return core


def make_saving() -> Core:
    core = make_running()
    deliver(core, StopRequested("SIGTERM"))
    deliver(core, *(Paused(worker, 1, 1) for worker in WORKERS))
    return core


def form_all(core: Core) -> list[Command]:
    assert isinstance(core.state.phase, Forming)
    workers = sorted(core.state.phase.pending)
    return deliver(core, *(GroupFormed(worker, core.state.generation) for worker in workers))


def reshard_all(core: Core) -> list[Command]:
    assert isinstance(core.state.phase, Resharding)
    workers, generation = sorted(core.state.phase.pending), core.state.generation
    return deliver(core, *(StateReady(w, generation, 0, 0, 0.0, 1, 1, 2) for w in workers))


def commit_event(core: Core, step: int) -> StepCommitted:
    generation = core.state.generation
    record = StepRecord(0.0, step, generation, 4, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
    return StepCommitted(generation, record, Vote(step, 1.0, 1, 1.0, 4))


def drive_to_next_forming(core: Core) -> list[Command]:
    """Answer the orders of the current phase until the core forms under the target layout."""
    commands: list[Command] = []
    if isinstance(core.state.phase, Waiting):
        commands += deliver(core, *(WorkerReady(worker, "node", 1) for worker in WORKERS))
        return commands
    if isinstance(core.state.phase, Forming):
        commands += form_all(core)
    if isinstance(core.state.phase, Resharding):
        commands += reshard_all(core)
    if isinstance(core.state.phase, Pausing):
        step, generation = core.state.committed_step, core.state.generation
        pending = sorted(core.state.phase.pending)
        commands += deliver(core, *(Paused(worker, generation, step) for worker in pending))
    if isinstance(core.state.phase, Aborting):
        vote = Vote(1, 1.0, 1, 1.0, 4)
        commands += deliver(core, *(Quiesced(w, 1, 1, vote) for w in ("w0", "w1", "w2")))
    return commands


PHASES: dict[type[Phase], tuple[Callable[[], Core], str]] = {
    Waiting: (make_waiting, ""),
    Forming: (make_forming, "dp=4"),
    Resharding: (make_resharding, "dp=4"),
    Running: (make_running, "dp=4"),
    Pausing: (make_pausing, "dp=4"),
    Aborting: (make_aborting, "dp=4"),
}


@pytest.mark.parametrize("kind", PHASES, ids=lambda kind: kind.__name__)
def test_layout_request_is_accepted_in_each_phase_and_formed_next(kind: type[Phase]) -> None:
    make_core, current_layout = PHASES[kind]
    core = make_core()
    assert isinstance(core.state.phase, kind)
    generation = core.state.generation
    commands = request_layout(core, "fsdp=3")
    assert commands[0] == LayoutAnswered(generation, "r", "fsdp=3", current_layout)
    assert core.state.layouts.target == TargetLayout.parse("fsdp=3", max_workers=4)
    commands = drive_to_next_forming(core)
    form = next(command for command in commands if isinstance(command, Form))
    assert str(form.assignment.layout) == "fsdp=3"
    assert form.generation > generation
    assert core.state.layouts.former is None


@pytest.mark.parametrize("kind", PHASES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("dp=5", "needs 5 workers"),
        ("pp=3,cp=2", "needs 6 workers"),
        ("tp=3", "divide 8"),
        ("pp=2,vp=2", "vp=2: this schedule knows one"),
    ],
)
def test_infeasible_layout_request_is_refused_and_changes_nothing(
    kind: type[Phase], layout: str, reason: str
) -> None:
    core = PHASES[kind][0]()
    before = core.state.layouts.target
    [answer] = request_layout(core, layout)
    assert isinstance(answer, LayoutAnswered)
    assert reason in answer.refusal and not answer.planned
    assert core.state.layouts.target == before
    assert isinstance(core.state.phase, kind)


def test_layout_request_is_refused_while_the_run_ends() -> None:
    core = make_saving()
    assert isinstance(core.state.phase, Saving)
    [answer] = request_layout(core, "fsdp=4")
    assert isinstance(answer, LayoutAnswered) and answer.refusal == "the run is about to end"


def test_request_for_the_current_layout_changes_nothing() -> None:
    core = make_running()
    assert request_layout(core, "dp=4") == [LayoutAnswered(1, "r", "dp=4", "dp=4")]
    assert isinstance(core.state.phase, Running)


def test_two_layout_requests_before_a_step_boundary_cause_one_pause() -> None:
    core = make_running()
    assert [type(command) for command in request_layout(core, "fsdp=4")] == [LayoutAnswered, Pause]
    assert [type(command) for command in request_layout(core, "dp=2,fsdp=2")] == [LayoutAnswered]
    commands = drive_to_next_forming(core)
    assert [str(c.assignment.layout) for c in commands if isinstance(c, Form)] == ["dp=2,fsdp=2"]
    form_all(core)
    assert any(isinstance(command, Resume) for command in reshard_all(core))
    assert isinstance(core.state.phase, Running), "and no second pause"


def test_target_layout_returns_if_two_later_requests_turn_out_infeasible() -> None:
    core = Core()
    target_layout = TargetLayout.parse("pp=2", max_workers=2)
    opening = RunOpened(1, users_policy(1, 2), target_layout, Job(1, state_bytes=1000, steps=10))
    deliver(core, opening, StoreReady("host", 1))
    request_layout(core, "fsdp=1")
    request_layout(core, "dp=1")
    ready_events = (WorkerReady(worker, "node", 1, memory_bytes=700) for worker in ("w0", "w1"))
    commands = deliver(core, *ready_events)
    refusals = [command.refusal for command in commands if isinstance(command, LayoutAnswered)]
    assert len(refusals) == 1 and "1000 bytes" in refusals[0]
    assert core.state.layouts.target == target_layout
    assert any(isinstance(command, Form) for command in commands)


def test_layout_request_for_full_capacity_waits_for_it() -> None:
    """With three of four workers the layout stays; the fourth brings the target layout."""
    core = make_running()
    deliver(core, WorkerLost("w3", "killed"))
    drive_to_next_forming(core)
    form_all(core)
    reshard_all(core)
    deliver(core, commit_event(core, 2))
    generation = core.state.generation
    assert request_layout(core, "dp=2,fsdp=2") == [LayoutAnswered(generation, "r", "dp=3", "dp=3")]
    commands = deliver(core, WorkerReady("w4", "node", 1))
    assert [command.cause for command in commands if isinstance(command, Pause)] == ["growth"]
    commands = drive_to_next_forming(core)
    assert [str(c.assignment.layout) for c in commands if isinstance(c, Form)] == ["dp=2,fsdp=2"]


def test_layout_that_became_infeasible_during_its_pause_is_withdrawn() -> None:
    """During the pause a worker is lost, and its replacement has too little memory."""
    core = Core()
    target_layout = TargetLayout.parse("pp=2", max_workers=2)
    opening = RunOpened(1, users_policy(2, 2), target_layout, Job(1, state_bytes=1000, steps=10))
    deliver(core, opening, StoreReady("host", 1))
    deliver(core, *(WorkerReady(worker, "node", 1) for worker in ("w0", "w1")))
    form_all(core)
    reshard_all(core)
    deliver(core, commit_event(core, 1))
    assert [type(command) for command in request_layout(core, "fsdp=1")] == [LayoutAnswered, Pause]
    deliver(core, WorkerLost("w1", "killed"), Quiesced("w0", 1, 1, Vote(1, 1.0, 1, 1.0, 2)))
    commands = deliver(core, WorkerReady("w2", "node", 1, memory_bytes=700))
    [answer] = [command for command in commands if isinstance(command, LayoutAnswered)]
    assert "1000 bytes" in answer.refusal
    assert core.state.layouts.target == target_layout and core.state.ending is None
    assert [str(c.assignment.layout) for c in commands if isinstance(c, Form)] == ["pp=2"]
