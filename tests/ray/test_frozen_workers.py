"""A worker or its node freezes: the run continues, and a process that wakes up does no harm."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from command_line import Command
from slow_run import assert_one_lineage, slow_run_arguments
from test_ray_notices import find_drainable_node
from test_ray_parity import processes_of_node, train_on_nodes

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
NUM_NODES = 3
HANG_TIMEOUT_S = 5.0
MAX_RECOVERY_S = 9.0
"""The worker is suspected after `failure.silence_timeout_s` (5 s), since nodes have no agents yet,
or as a hang. It is ended a second later; then the others form and commit a step."""
FROZEN_S = 10.0
"""Less than Ray needs to declare a node dead: the node wakes up in a cluster that still has it."""


def freeze(processes: list[psutil.Process]) -> float:
    """Send SIGSTOP to all; return the time."""
    frozen_at = time.time()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    return frozen_at


@pytest.mark.parametrize("frozen_part", [pytest.param("worker", marks=pytest.mark.soak), "machine"])
def test_frozen_worker_is_dropped_and_fenced(tmp_path: Path, frozen_part: str) -> None:
    """A frozen worker is killed before it can wake up. If its whole node was frozen, it wakes up
    and ends at once."""
    train = slow_run_arguments(
        "dp=3", f"2:{NUM_NODES}", f"failure.hang_timeout_s={HANG_TIMEOUT_S:g}"
    )
    with train_on_nodes(tmp_path, *train, num_nodes=NUM_NODES) as command:
        command.wait_for_step(20)
        worker, _, machine = find_drainable_node(command)
        frozen_worker = psutil.Process(command.pid_of(worker))
        processes = [frozen_worker] if frozen_part == "worker" else machine
        frozen_at = freeze(processes)
        command.wait_until(lambda: command.metrics()[-1]["generation"] > 1, "the next generation")
        next_step = next(line for line in command.metrics() if line["generation"] > 1)
        recovery_s = next_step["time"] - frozen_at
        print(f"{frozen_part}: {recovery_s:.2f} s from SIGSTOP to the next committed step")
        assert recovery_s < MAX_RECOVERY_S
        time.sleep(max(0.0, frozen_at + FROZEN_S - time.time()))
        assert frozen_part == "machine" or not frozen_worker.is_running()
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
def test_dropped_worker_ends_although_its_agent_loses_the_order(
    tmp_path: Path, agent: str, within_s: float
) -> None:
    """A worker that was dropped and still runs ends as soon as Ray kills it, or as soon as it
    detects that it is an orphan."""
    patience = (f"failure.hang_timeout_s={HANG_TIMEOUT_S:g}", "failure.orphan_timeout_s=30")
    train = slow_run_arguments("dp=2", "1:2", *patience)
    with train_on_nodes(tmp_path, *train, num_nodes=2) as command:
        command.wait_for_step(20)
        worker, _, _ = find_drainable_node(command)
        worker_process = psutil.Process(command.pid_of(worker))
        command.wait_until(lambda: agents_on_node_of(worker_process), "the agent of its node")
        [agent_process] = agents_on_node_of(worker_process)
        freeze([agent_process, worker_process])
        command.wait_until(lambda: is_ordered_to_end(command, worker), "the order to end")
        ordered_at = time.time()
        if agent == "dies":
            agent_process.kill()
        worker_process.resume()
        command.wait_until(lambda: not worker_process.is_running(), "its end")
        end_s = time.time() - ordered_at
        print(f"the agent {agent}: {end_s:.2f} s from the order to the end")
        assert end_s < within_s
        command.wait_until(lambda: len(command.lines("Resume")) > 2, "a replacement")
        command.process.terminate()
        code, output = command.finish()
        assert code == 143, output
    assert_one_lineage(command)


def agents_on_node_of(process: psutil.Process) -> list[psutil.Process]:
    """The agents on the node of a process."""
    return [
        other
        for other in processes_of_node(process.pid)
        if other.name().startswith("ray::RayAgent")
    ]


def is_ordered_to_end(command: Command, worker: str) -> bool:
    return worker in [line["worker"] for line in command.lines("StopWorker")]
