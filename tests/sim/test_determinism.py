"""The same seed gives the same run, event by event, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sim.scenario import drawn
from sim.simulation import simulate, trace

TESTS = Path(__file__).parents[1]
TELL = """
from sim.scenario import drawn
from sim.simulation import simulate, trace
print("".join(trace(simulate(drawn(seed))) for seed in range(12)))
"""


def test_a_run_can_be_repeated() -> None:
    assert trace(simulate(drawn(3))) == trace(simulate(drawn(3)))
    assert trace(simulate(drawn(3))) != trace(simulate(drawn(4)))


def test_the_order_of_sets_decides_nothing() -> None:
    """No set is iterated into a decision: strings hash differently in these processes."""
    path = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    told = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", TELL]
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        told.append(done.stdout)
    assert told[0] == told[1]
