"""Sudden loss of a node: the run recovers before Ray notices."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from command_line import Command
from test_model_axes import arguments, assert_equals_plain_loop
from test_ray_notices import a_node_to_drain
from test_ray_parity import on_nodes
from test_ray_snapshots import are_protected, assert_nothing_is_lost

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
NUM_NODES = 3
NUM_STEPS = 240
BEFORE_RAY_S = 8.0
"""The target is 3 s; a machine under load may need more, but never as long as Ray does."""


def take_down(processes: list[psutil.Process]) -> float:
    """Kill the raylet first, so that it cannot report the other deaths; return the time."""
    killed = time.time()
    for process in reversed(processes):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    return killed


def until_next_commit(command: Command, killed: float) -> float:
    """The seconds until the first step that the survivors have committed."""
    [generation] = {line["generation"] for line in command.lines("Resume")[:1]}
    others = [line for line in command.metrics() if line["generation"] > generation]
    return float(others[0]["time"] - killed)


@pytest.mark.parametrize("layout", [pytest.param("dp=3", marks=pytest.mark.soak), "fsdp=3"])
def test_the_next_step_does_not_wait_for_ray(tmp_path: Path, layout: str) -> None:
    train = arguments("tiny", layout, f"2:{NUM_NODES}", NUM_STEPS)
    with on_nodes(tmp_path, *train, num_nodes=NUM_NODES) as command:
        command.wait_for_step(20)
        if layout == "fsdp=3":
            command.wait_until(lambda: are_protected(command, 1), "the first snapshots")
        worker, _, processes = a_node_to_drain(command)
        killed = take_down(processes)
        code, output = command.finish()
        assert code == 0, output
        took = until_next_commit(command, killed)
        print(f"{layout}: {took:.2f} s from SIGKILL of the node to the next committed step")
        assert took < BEFORE_RAY_S
        assert worker not in command.lines("Resume")[1]["workers"]
        if layout == "dp=3":
            assert_equals_plain_loop(command, "tiny", NUM_STEPS)
        else:
            assert_nothing_is_lost(command, NUM_STEPS)
