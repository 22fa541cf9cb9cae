"""A worker or its node freezes: the run goes on, and a process that wakes up does no harm."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from command_line import Command
from test_ray_notices import a_node_to_drain
from test_ray_parity import node_of, on_nodes
from unhurried import assert_one_lineage, unhurried

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
NUM_NODES = 3
HANG_TIMEOUT_S = 5.0
FOUND_S = 9.0
"""The worker is suspected after `failure.silence_timeout_s` (5 s), since nodes have no agents yet,
or as a hang. It is ended a second later; then the others form and commit a step."""
FROZEN_S = 10.0
"""Less than Ray needs to declare a node dead: the node wakes up in a cluster that still has it."""


def freeze(processes: list[psutil.Process]) -> float:
    """Send SIGSTOP to all; return the time."""
    frozen = time.time()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    return frozen


@pytest.mark.parametrize("what", [pytest.param("worker", marks=pytest.mark.soak), "machine"])
def test_frozen_worker_is_dropped_and_fenced(tmp_path: Path, what: str) -> None:
    """A frozen worker has been ended before it could wake up. If its whole node was frozen, it
    wakes up and ends before it has done anything."""
    train = unhurried("dp=3", f"2:{NUM_NODES}", f"failure.hang_timeout_s={HANG_TIMEOUT_S:g}")
    with on_nodes(tmp_path, *train, num_nodes=NUM_NODES) as command:
        command.wait_for_step(20)
        worker, _, machine = a_node_to_drain(command)
        frozen_worker = psutil.Process(command.pid_of(worker))
        processes = [frozen_worker] if what == "worker" else machine
        frozen = freeze(processes)
        command.wait_until(lambda: command.metrics()[-1]["generation"] > 1, "the next generation")
        next_step = next(line for line in command.metrics() if line["generation"] > 1)
        took = next_step["time"] - frozen
        print(f"{what}: {took:.2f} s from SIGSTOP to the next committed step")
        assert took < FOUND_S
        time.sleep(max(0.0, frozen + FROZEN_S - time.time()))
        assert what == "machine" or not frozen_worker.is_running()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        command.wait_until(lambda: not frozen_worker.is_running(), "the end of the frozen worker")
        command.wait_until(lambda: len(command.lines("Resume")) > 2, "a replacement")
        command.wait_for_step(len(command.metrics()) + 10)
        command.process.terminate()
        code, output = command.finish()
        assert code == 143, output
    for resume in command.lines("Resume")[1:]:
        assert worker not in resume["workers"]
    assert_one_lineage(command)


@pytest.mark.soak
@pytest.mark.parametrize(("agent", "within_s"), [("dies", 20.0), ("freezes", 60.0)])
def test_dropped_worker_ends_though_its_agent_loses_the_order(
    tmp_path: Path, agent: str, within_s: float
) -> None:
    """A worker that was dropped and still runs ends as soon as Ray ends it, or as soon as it finds
    itself an orphan."""
    patience = (f"failure.hang_timeout_s={HANG_TIMEOUT_S:g}", "failure.orphan_timeout_s=30")
    train = unhurried("dp=2", "1:2", *patience)
    with on_nodes(tmp_path, *train, num_nodes=2) as command:
        command.wait_for_step(20)
        worker, _, _ = a_node_to_drain(command)
        left = psutil.Process(command.pid_of(worker))
        command.wait_until(lambda: agents_beside(left), "the agent of its node")
        [its_agent] = agents_beside(left)
        freeze([its_agent, left])
        command.wait_until(lambda: is_ordered_to_end(command, worker), "the order to end")
        ordered = time.time()
        if agent == "dies":
            its_agent.kill()
        left.resume()
        command.wait_until(lambda: not left.is_running(), "its end")
        took = time.time() - ordered
        print(f"the agent {agent}: {took:.2f} s from the order to the end")
        assert took < within_s
        command.wait_until(lambda: len(command.lines("Resume")) > 2, "a replacement")
        command.process.terminate()
        code, output = command.finish()
        assert code == 143, output
    assert_one_lineage(command)


def agents_beside(process: psutil.Process) -> list[psutil.Process]:
    """The agents on the node of a process."""
    return [other for other in node_of(process.pid) if other.name().startswith("ray::RayAgent")]


def is_ordered_to_end(command: Command, worker: str) -> bool:
    return worker in [line["worker"] for line in command.lines("StopWorker")]
