"""Simulated runs whose snapshots take longer than a step and the wait of a vote."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from sim.fresh_seeds import FreshSeeds
from sim.scenario import Scenario, drawn_with_parities, drawn_with_snapshots
from sim.simulation import simulate

pytestmark = pytest.mark.slow

NUM_SEEDS = 30


def drawn_with_slow_copies(seed: int) -> Scenario:
    random = Random(f"slow/{seed}")
    scenario = random.choice((drawn_with_snapshots, drawn_with_parities))(seed)
    scenario.snapshot_s = random.choice(((0.6, 1.2), (0.3, 1.5)))
    scenario.job = replace(scenario.job, steps=scenario.job.steps + 150)
    return scenario


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 30))
def test_runs_with_slow_copies_survive_faults(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 30):
        simulate(drawn_with_slow_copies(seed))
