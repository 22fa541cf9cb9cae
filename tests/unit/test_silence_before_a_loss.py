"""Poison-batch detection ignores the loss of a worker that was silent before."""

from __future__ import annotations

import pytest
from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.events import (
    Event,
    GroupFormed,
    Quiesced,
    RunOpened,
    StateReady,
    StepCommitted,
    StoreReady,
    WorkerLost,
    WorkerReady,
    WorkerSuspected,
)
from elastic.protocol.phases import Running
from elastic.protocol.votes import StepRecord, Vote

WORKERS = ("w0", "w1", "w2")


def make_running_core() -> Core:
    """Three replicas that have committed a step."""
    core = Core()
    record = StepRecord(0.0, 1, 1, 3, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
    events: list[Event] = [
        RunOpened(
            1, users_policy(1, 3), TargetLayout.parse("dp=3", 3), Job(6, microbatch=1, steps=100)
        ),
        StoreReady("host", 1),
        *(WorkerReady(worker, "node", 1) for worker in WORKERS),
        *(GroupFormed(worker, 1) for worker in WORKERS),
        *(StateReady(worker, 1, 0, 0, 0.0, 1, 1, 2) for worker in WORKERS),
        StepCommitted(1, record, Vote(1, 1.0, 1, 1.0, 3)),
    ]
    for event in events:
        core.step(1.0, event)
    assert isinstance(core.state.phase, Running)
    return core


@pytest.mark.parametrize("is_silent", [True, False])
def test_only_a_death_without_silence_makes_its_batch_suspect(is_silent: bool) -> None:
    core = make_running_core()
    if is_silent:
        core.step(9.0, WorkerSuspected("w2", "no answer to a probe for 6.0 s"))
        for worker in ("w0", "w1"):
            core.step(9.1, Quiesced(worker, 1, 1))
    core.step(9.2, WorkerLost("w2", "killed"))
    assert (core.state.poison.fatal_step == 2 and bool(core.state.poison.fatal)) != is_silent


def test_silence_in_an_earlier_generation_does_not_count() -> None:
    core = make_running_core()
    core.step(9.0, WorkerSuspected("w2", "no answer to a probe for 6.0 s"))
    for worker in WORKERS:
        core.step(9.1, Quiesced(worker, 1, 1))
    assert core.state.generation == 2
    for event in (
        *(GroupFormed(worker, 2) for worker in WORKERS),
        *(StateReady(worker, 2, 0, 0, 0.0, 1, 1, 2) for worker in WORKERS),
        WorkerLost("w2", "killed"),
    ):
        core.step(9.2, event)
    assert core.state.poison.fatal
