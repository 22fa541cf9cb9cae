"""A wish for another layout: what the core answers in each phase, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.model_limits import Limits
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, Form, LayoutAnswered, Pause, Resume
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

FOUR = ("w0", "w1", "w2", "w3")
JOB = Job(8, steps=10, limits=Limits(tp_divides=8, one_stage="this schedule knows one"))


def told(core: Core, *events: Event, now: float = 1.0) -> list[Command]:
    return [command for event in events for command in core.step(now, event)]


def asked(core: Core, layout: str) -> list[Command]:
    return told(core, LayoutRequested("r", TargetLayout.parse(layout)))


def waiting() -> Core:
    core = Core()
    target_layout = TargetLayout.parse("dp=4", max_workers=4)
    told(core, RunOpened(1, users_policy(2, 4), target_layout, JOB), StoreReady("host", 1))
    return core


def forming() -> Core:
    core = waiting()
    told(core, *(WorkerReady(worker, "node", 1) for worker in FOUR))
    return core


def relaying() -> Core:
    core = forming()
    form_all(core)
    return core


def running() -> Core:
    core = relaying()
    move_all(core)
    told(core, committed(core, 1))
    return core


def pausing() -> Core:
    core = running()
    asked(core, "fsdp=2")
    return core


def aborting() -> Core:
    core = running()
    told(core, WorkerLost("w3", "killed"))
    return core


def saving() -> Core:
    core = running()
    told(core, StopRequested("SIGTERM"))
    told(core, *(Paused(worker, 1, 1) for worker in FOUR))
    return core


def form_all(core: Core) -> list[Command]:
    assert isinstance(core.state.phase, Forming)
    workers = sorted(core.state.phase.pending)
    return told(core, *(GroupFormed(worker, core.state.generation) for worker in workers))


def move_all(core: Core) -> list[Command]:
    assert isinstance(core.state.phase, Resharding)
    workers, generation = sorted(core.state.phase.pending), core.state.generation
    return told(core, *(StateReady(w, generation, 0, 0, 0.0, 1, 1, 2) for w in workers))


def committed(core: Core, step: int) -> StepCommitted:
    generation = core.state.generation
    record = StepRecord(0.0, step, generation, 4, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
    return StepCommitted(generation, record, Vote(step, 1.0, 1, 1.0, 4))


def brought_to_the_next_forming(core: Core) -> list[Command]:
    """Whatever it does now, until it forms under the wish."""
    commands: list[Command] = []
    if isinstance(core.state.phase, Waiting):
        commands += told(core, *(WorkerReady(worker, "node", 1) for worker in FOUR))
        return commands
    if isinstance(core.state.phase, Forming):
        commands += form_all(core)
    if isinstance(core.state.phase, Resharding):
        commands += move_all(core)
    if isinstance(core.state.phase, Pausing):
        step, generation = core.state.committed_step, core.state.generation
        pending = sorted(core.state.phase.pending)
        commands += told(core, *(Paused(worker, generation, step) for worker in pending))
    if isinstance(core.state.phase, Aborting):
        vote = Vote(1, 1.0, 1, 1.0, 4)
        commands += told(core, *(Quiesced(w, 1, 1, vote) for w in ("w0", "w1", "w2")))
    return commands


PHASES: dict[type[Phase], tuple[Callable[[], Core], str]] = {
    Waiting: (waiting, ""),
    Forming: (forming, "dp=4"),
    Resharding: (relaying, "dp=4"),
    Running: (running, "dp=4"),
    Pausing: (pausing, "dp=4"),
    Aborting: (aborting, "dp=4"),
}


@pytest.mark.parametrize("kind", PHASES, ids=lambda kind: kind.__name__)
def test_it_is_accepted_and_formed_next(kind: type[Phase]) -> None:
    reach, present = PHASES[kind]
    core = reach()
    assert isinstance(core.state.phase, kind)
    generation = core.state.generation
    commands = asked(core, "fsdp=3")
    assert commands[0] == LayoutAnswered(generation, "r", "fsdp=3", present)
    assert core.state.layouts.target == TargetLayout.parse("fsdp=3", max_workers=4)
    commands = brought_to_the_next_forming(core)
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
def test_it_is_refused_and_nothing_changes(kind: type[Phase], layout: str, reason: str) -> None:
    core = PHASES[kind][0]()
    before = core.state.layouts.target
    [answer] = asked(core, layout)
    assert isinstance(answer, LayoutAnswered)
    assert reason in answer.refusal and not answer.planned
    assert core.state.layouts.target == before
    assert isinstance(core.state.phase, kind)


def test_a_run_that_ends_refuses() -> None:
    core = saving()
    assert isinstance(core.state.phase, Saving)
    [answer] = asked(core, "fsdp=4")
    assert isinstance(answer, LayoutAnswered) and answer.refusal == "the run is about to end"


def test_what_is_so_already_does_nothing() -> None:
    core = running()
    assert asked(core, "dp=4") == [LayoutAnswered(1, "r", "dp=4", "dp=4")]
    assert isinstance(core.state.phase, Running)


def test_two_wishes_before_the_boundary_make_one_pause() -> None:
    core = running()
    assert [type(command) for command in asked(core, "fsdp=4")] == [LayoutAnswered, Pause]
    assert [type(command) for command in asked(core, "dp=2,fsdp=2")] == [LayoutAnswered]
    commands = brought_to_the_next_forming(core)
    assert [str(c.assignment.layout) for c in commands if isinstance(c, Form)] == ["dp=2,fsdp=2"]
    form_all(core)
    assert any(isinstance(command, Resume) for command in move_all(core))
    assert isinstance(core.state.phase, Running), "and no second pause"


def test_the_wish_before_both_comes_back_if_neither_can_be_had() -> None:
    core = Core()
    target_layout = TargetLayout.parse("pp=2", max_workers=2)
    opening = RunOpened(1, users_policy(1, 2), target_layout, Job(1, state_bytes=1000, steps=10))
    told(core, opening, StoreReady("host", 1))
    asked(core, "fsdp=1")
    asked(core, "dp=1")
    ready = (WorkerReady(worker, "node", 1, memory_bytes=700) for worker in ("w0", "w1"))
    commands = told(core, *ready)
    refusals = [command.refusal for command in commands if isinstance(command, LayoutAnswered)]
    assert len(refusals) == 1 and "1000 bytes" in refusals[0]
    assert core.state.layouts.target == target_layout
    assert any(isinstance(command, Form) for command in commands)


def test_a_wish_for_full_strength_waits_for_it() -> None:
    """Three of four are there: what can be had now stays, and the wish comes with the fourth."""
    core = running()
    told(core, WorkerLost("w3", "killed"))
    brought_to_the_next_forming(core)
    form_all(core)
    move_all(core)
    told(core, committed(core, 2))
    generation = core.state.generation
    assert asked(core, "dp=2,fsdp=2") == [LayoutAnswered(generation, "r", "dp=3", "dp=3")]
    commands = told(core, WorkerReady("w4", "node", 1))
    assert [command.cause for command in commands if isinstance(command, Pause)] == ["growth"]
    commands = brought_to_the_next_forming(core)
    assert [str(c.assignment.layout) for c in commands if isinstance(c, Form)] == ["dp=2,fsdp=2"]


def test_what_its_own_pause_makes_impossible_is_taken_back() -> None:
    """While all stop for it, a worker is lost, and another comes that has too little memory."""
    core = Core()
    target_layout = TargetLayout.parse("pp=2", max_workers=2)
    opening = RunOpened(1, users_policy(2, 2), target_layout, Job(1, state_bytes=1000, steps=10))
    told(core, opening, StoreReady("host", 1))
    told(core, *(WorkerReady(worker, "node", 1) for worker in ("w0", "w1")))
    form_all(core)
    move_all(core)
    told(core, committed(core, 1))
    assert [type(command) for command in asked(core, "fsdp=1")] == [LayoutAnswered, Pause]
    told(core, WorkerLost("w1", "killed"), Quiesced("w0", 1, 1, Vote(1, 1.0, 1, 1.0, 2)))
    commands = told(core, WorkerReady("w2", "node", 1, memory_bytes=700))
    [answer] = [command for command in commands if isinstance(command, LayoutAnswered)]
    assert "1000 bytes" in answer.refusal
    assert core.state.layouts.target == target_layout and core.state.ending is None
    assert [str(c.assignment.layout) for c in commands if isinstance(c, Form)] == ["pp=2"]
