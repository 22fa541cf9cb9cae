"""Recoveries under load, with the policy that users get: no healthy worker is stopped."""

from __future__ import annotations

from itertools import count

import pytest
from sim.scenario import drawn_under_load
from sim.simulation import simulate

from elastic.protocol.commands import Abort, Form, StopWorker
from pipelines.run.options import policy_of
from pipelines.settings import TrainSettings

pytestmark = pytest.mark.slow

NUM_RECOVERIES = 500
FAULTY = ("freeze", "hang", "kill and report late")


def test_500_recoveries_stop_no_healthy_worker() -> None:
    policy = policy_of(TrainSettings(), 1, 2, "run")
    num_recoveries, num_suspects = 0, 0
    for seed in count():
        world = simulate(drawn_under_load(seed, policy))
        sent = [command for _, _, commands, _ in world.records.trace for command in commands]
        faulty = {w.split()[0] for _, action, w in world.struck if action in FAULTY}
        stopped = {c.worker for c in sent if isinstance(c, StopWorker)}
        assert stopped <= faulty, f"seed {seed}: {sorted(stopped - faulty)} were healthy"
        assert any(isinstance(command, Form) for command in sent)
        num_recoveries += sum(isinstance(command, Abort) for command in sent)
        num_suspects += len(stopped)
        if num_recoveries >= NUM_RECOVERIES:
            break
    assert num_suspects > 20, "stalled workers are stopped"
