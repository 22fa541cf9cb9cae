"""Scenarios in which the controller's own shell has faults: exceptions, outages, a lost lease."""

from __future__ import annotations

from random import Random

from sim.faults import RESTARTS, draw_controller_restarts, draw_shell_faults
from sim.scenario import (
    Scenario,
    drawn,
    drawn_with_layout_requests,
    drawn_with_snapshots,
    drawn_with_storage_faults,
)


def drawn_with_shell_faults(seed: int) -> Scenario:
    """A scenario of any kind, in which the shell has faults, and sometimes dies as well.

    It does not die with an outage of its logs: what waits in its memory would be lost with it.
    """
    random = Random(f"shell/{seed}")
    draws = (drawn, drawn_with_snapshots, drawn_with_storage_faults, drawn_with_layout_requests)
    scenario = random.choice(draws)(seed)
    if random.random() < 0.5:
        scenario.faults = random.sample(scenario.faults, min(1, len(scenario.faults)))
    scenario.faults = [*scenario.faults, *draw_shell_faults(random)]
    if random.random() < 0.3:
        scenario.faults = [*scenario.faults, *draw_controller_restarts(random)]
    if any(fault.action == "refuse the logs" for fault in scenario.faults):
        scenario.faults = [f for f in scenario.faults if f.action not in RESTARTS]
    return scenario
