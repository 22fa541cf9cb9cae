"""Scenarios in which the write of a checkpoint part never returns."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from sim.faults import Fault, draw_hung_writes
from sim.scenario import Scenario, drawn, drawn_with_layout_requests, drawn_with_snapshots


def drawn_with_hung_writes(seed: int) -> Scenario:
    """A scenario of any kind with checkpoints by steps or by time. Some of them never complete
    unless the controller handles a write that hangs."""
    random = Random(f"hung/{seed}")
    scenario = random.choice((drawn, drawn_with_snapshots, drawn_with_layout_requests))(seed)
    checkpoint_every = random.choice((0, 0, 2, 20))
    scenario.job = replace(
        scenario.job, steps=random.choice((40, 400)), checkpoint_every=checkpoint_every
    )
    scenario.policy = replace(
        scenario.policy,
        save_timeout_s=random.choice((1.0, 6.0)),
        checkpoint_auto=not checkpoint_every,
        checkpoint_least_s=0.5,
        checkpoint_most_s=1.0,
    )
    scenario.faults = [*scenario.faults[:2], *draw_hung_writes(random)]
    return scenario


def drawn_with_one_hung_write(seed: int) -> Scenario:
    """The only fault is one write of one worker's part that never returns."""
    random = Random(f"one hung/{seed}")
    scenario = drawn_with_hung_writes(seed)
    max_workers = random.choice((2, 3, 4))
    scenario.layout = random.choice(("", f"fsdp={max_workers}", "pp=2", "tp=2", "dp=2"))
    scenario.memory_bytes, scenario.num_slow_starters = None, 0
    scenario.job = replace(scenario.job, steps=600)
    min_workers = random.choice((1, max_workers))
    scenario.policy = replace(scenario.policy, min_workers=min_workers, max_workers=max_workers)
    scenario.faults = [Fault("hang the write", "writing", random.randrange(12))]
    return scenario
