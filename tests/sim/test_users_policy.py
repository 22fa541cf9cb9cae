"""Recoveries under load, with the policy that users get: no healthy worker is ended."""

from __future__ import annotations

from itertools import count

from sim.scenario import drawn_under_load
from sim.simulation import simulate

from elastic.protocol.commands import Abort, Form, StopWorker
from pipelines.run.options import policy_of
from pipelines.settings import TrainSettings

NUM_RECOVERIES = 500
FAULTY = ("freeze", "hang", "kill and tell late")


def test_no_healthy_worker_is_ended_in_500_recoveries() -> None:
    policy = policy_of(TrainSettings(), 1, 2, "run")
    num_recoveries, num_suspects = 0, 0
    for seed in count():
        world = simulate(drawn_under_load(seed, policy))
        told = [command for _, _, commands, _ in world.records.trace for command in commands]
        faulty = {w.split()[0] for _, action, w in world.happened if action in FAULTY}
        ended = {c.worker for c in told if isinstance(c, StopWorker)}
        assert ended <= faulty, f"seed {seed}: {sorted(ended - faulty)} were healthy"
        assert any(isinstance(command, Form) for command in told)
        num_recoveries += sum(isinstance(command, Abort) for command in told)
        num_suspects += len(ended)
        if num_recoveries >= NUM_RECOVERIES:
            break
    assert num_suspects > 20, "workers that stand still are ended"
