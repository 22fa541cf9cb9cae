"""Simulated runs with `snapshot.every=auto`: the interval changes during faults."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from sim.fresh_seeds import FreshSeeds
from sim.scenario import Scenario, drawn_with_parities, drawn_with_snapshots
from sim.simulation import simulate

from elastic.reshard.snapshot_interval import AUTO_EVERY

pytestmark = pytest.mark.slow

NUM_SEEDS = 100


def drawn_with_auto_snapshots(seed: int) -> Scenario:
    random = Random(f"auto/{seed}")
    scenario = random.choice((drawn_with_snapshots, drawn_with_parities))(seed)
    scenario.policy = replace(scenario.policy, snapshot_every=AUTO_EVERY)
    return scenario


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
def test_runs_survive_changes_of_the_snapshot_interval(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_auto_snapshots(seed))
