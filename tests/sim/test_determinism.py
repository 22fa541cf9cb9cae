"""A seed gives the same run, event by event, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sim.scenario import drawn
from sim.simulation import simulate, trace

TESTS = Path(__file__).parents[1]
PROGRAM = """
from sim.scenario import drawn
from sim.simulation import simulate, trace
print("".join(trace(simulate(drawn(seed))) for seed in range(12)))
"""


def test_a_seed_repeats_its_run() -> None:
    assert trace(simulate(drawn(3))) == trace(simulate(drawn(3)))
    assert trace(simulate(drawn(3))) != trace(simulate(drawn(4)))


def test_set_order_changes_no_decision() -> None:
    """No decision depends on the order of a set: strings hash differently in these processes."""
    path = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    traces = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", PROGRAM]
        completed = subprocess.run(command, env=environment, capture_output=True, check=True)
        traces.append(completed.stdout)
    assert traces[0] == traces[1]
