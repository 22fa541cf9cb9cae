"""Ten thousand workers: the core alone does not slow down a recovery."""

from __future__ import annotations

import gc
from time import process_time

from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Abort, Command, Form, Reshard, Resume, StartWorkers
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
)
from elastic.protocol.phases import Running
from elastic.protocol.votes import StepRecord, Vote

NUM_WORKERS = 10_000
WORKERS_PER_NODE = 8


class Crowd:
    """All workers answer every command at once."""

    def __init__(self) -> None:
        self.core = Core()
        self.now = 0.0

    def handle(self, event: Event) -> None:
        """Handle one event, and all that follow from it."""
        waiting: list[Event] = [event]
        while waiting:
            answers: list[Event] = []
            for current in waiting:
                self.now += 1e-6
                for command in self.core.step(self.now, current):
                    answers += self._answers(command)
            waiting = answers

    def _answers(self, command: Command) -> list[Event]:
        match command:
            case StartWorkers():
                names = command.workers
                return [
                    WorkerReady(name, f"node{int(name[1:]) // WORKERS_PER_NODE}", 1)
                    for name in names
                ]
            case Form():
                workers = command.plan.participants
                return [GroupFormed(name, command.generation) for name in workers]
            case Reshard():
                workers, generation = command.workers, command.generation
                return [StateReady(name, generation, 0, 0, 0.0, 1, 1, 2) for name in workers]
            case Abort():
                step = self.core.state.committed_step
                workers, generation = command.workers, command.generation
                return [Quiesced(name, generation, step) for name in workers]
            case Resume():
                step, generation = command.step + 1, command.generation
                record = StepRecord(0.0, step, generation, 1, 1.0, 1, 0.1, 1.0, 0.5, False)
                return [StepCommitted(generation, record, Vote(step, 1.0, 1, 1.0, 1))]
        return []


def start_and_lose_one(num_workers: int) -> float:
    """The seconds of processor time that the core needs for both."""
    crowd = Crowd()
    gc.collect()
    began = process_time()
    policy = users_policy(num_workers // 2, num_workers)
    job = Job(num_microbatches=num_workers, steps=1000)
    crowd.handle(RunOpened(1, policy, TargetLayout.parse("pp=4,tp=8", num_workers), job))
    crowd.handle(StoreReady("host", 1))
    state = crowd.core.state
    assert isinstance(state.phase, Running)
    before = state.live.members()
    assert len(before) == num_workers // 32 * 32
    lost = before[num_workers // 8]

    crowd.handle(WorkerLost(lost, "killed"))
    assert isinstance(state.phase, Running)
    assert (state.generation, state.committed_step) == (2, 2)
    after = state.live.members()
    assert lost not in after
    assert len(after) == len(before)
    moved = sum(old != new for old, new in zip(before, after, strict=True))
    assert moved <= WORKERS_PER_NODE, "a worker moved without need"
    return process_time() - began


def test_four_times_the_workers_take_four_times_as_long() -> None:
    """A search through all workers at each of their events would take sixteen times as long."""
    start_and_lose_one(NUM_WORKERS // 4)  # fills caches
    assert start_and_lose_one(NUM_WORKERS) < 8 * start_and_lose_one(NUM_WORKERS // 4)
