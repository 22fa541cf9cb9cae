"""Workers run out of memory: the layout is marked once, and the next that fits is formed."""

from __future__ import annotations

import pytest
from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, Form
from elastic.protocol.events import (
    Event,
    GroupFormed,
    Quiesced,
    RunOpened,
    StoreReady,
    WorkerRaised,
    WorkerReady,
)

WORKERS = ("w0", "w1", "w2", "w3")
JOB = Job(8, steps=10, state_bytes=3000, param_bytes=1000)


def deliver(core: Core, *events: Event) -> list[Command]:
    return [command for event in events for command in core.step(1.0, event)]


def resharding(layout: str) -> Core:
    core = Core()
    target_layout = TargetLayout.parse(layout, max_workers=4)
    deliver(core, RunOpened(1, users_policy(4, 4), target_layout, JOB), StoreReady("host", 1))
    deliver(core, *(WorkerReady(worker, "node", 1) for worker in WORKERS))
    deliver(core, *(GroupFormed(worker, core.state.generation) for worker in WORKERS))
    return core


def run_out(worker: str, generation: int) -> WorkerRaised:
    return WorkerRaised(worker, generation, "memory", "no memory", "", 3500, 500)


@pytest.mark.parametrize("num_shortages", [1, 3])
def test_workers_that_run_out_at_once_continue_under_the_next_layout(num_shortages: int) -> None:
    core = resharding("dp=4")
    generation = core.state.generation
    deliver(core, *(run_out(worker, generation) for worker in WORKERS[:num_shortages]))
    bound = core.state.job.most_bytes
    assert bound is not None and bound < 4000, "of parameters, gradients and optimizer state"
    commands = deliver(core, *(Quiesced(worker, generation, 0) for worker in WORKERS))
    layouts = [str(command.assignment.layout) for command in commands if isinstance(command, Form)]
    assert layouts and "fsdp" in layouts[-1], commands
    assert core.state.ending is None


def test_shortage_of_another_generation_marks_nothing() -> None:
    core = resharding("dp=4")
    deliver(core, run_out("w0", core.state.generation - 1))
    assert core.state.job.most_bytes is None
