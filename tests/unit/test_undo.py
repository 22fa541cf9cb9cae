"""The copies of the core's state from which an event is undone."""

from __future__ import annotations

import pytest
from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command
from elastic.protocol.events import RunOpened, StoreReady, Woke, WorkerReady
from elastic.replay.undo import EVENTS_PER_WORKER, NUM_KEPT_EVENTS, UndoableCore

NUM_WORKERS = 200


class FailingCore(Core):
    """Raises at one moment, half-way through a change."""

    fails_at = -1.0

    def _wake(self, now: float) -> list[Command]:
        if now == self.fails_at:
            self.state.committed_step += 1000
            raise RuntimeError("half-way")
        return super()._wake(now)


def test_large_run_copies_its_state_less_often_and_still_undoes_an_event() -> None:
    core = FailingCore()
    undoable = UndoableCore(core)
    policy = users_policy(NUM_WORKERS, NUM_WORKERS)
    undoable.step(0.0, RunOpened(1, policy, TargetLayout(), Job(steps=10)))
    undoable.step(0.1, StoreReady("host", 1))
    num_events = 2
    for worker in sorted(core.state.membership.records)[:-1]:
        undoable.step(1.0, WorkerReady(worker, "node", 1))
        num_events += 1
    for _ in range(NUM_KEPT_EVENTS - num_events):
        undoable.step(2.0, Woke())  # the next copy is of a state with workers
    copied = undoable._base
    for number in range(EVENTS_PER_WORKER * NUM_WORKERS - 1):
        undoable.step(3.0 + number, Woke())
    assert undoable._base is copied
    core.fails_at = 9999.0
    with pytest.raises(RuntimeError):
        undoable.step(9999.0, Woke())
    assert core.state.committed_step == 0
    assert len(core.state.membership.warm) == NUM_WORKERS - 1
