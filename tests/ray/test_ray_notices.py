"""A node of a real Ray cluster announces its end: it drains in time, and no step is repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from command_line import Command
from test_model_axes import arguments, assert_equals_plain_loop
from test_ray_parity import hosts_controller_or_store, processes_of_node, train_on_nodes

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
NUM_NODES = 3
NUM_STEPS = 350
NOTICE_S = 10
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def drain(address: str, node: str) -> tuple[float, float]:
    """Drain a node, as a user or the autoscaler does. Return the earliest and the latest deadline:
    the command takes seconds to start, and the notice begins when it reaches the cluster."""
    options = {
        "--address": address,
        "--node-id": node,
        "--reason": "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message": "a test",
        "--deadline-remaining-seconds": str(NOTICE_S),
    }
    words = [word for option in options.items() for word in option]
    earliest = time.time() + NOTICE_S
    subprocess.run([*RAY, "drain-node", *words], check=True, timeout=60, capture_output=True)
    return earliest, time.time() + NOTICE_S


@contextmanager
def start_pod(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node as in a Kubernetes pod, where the first process gets SIGTERM."""
    process = subprocess.Popen(
        [*RAY, "start", "--address", address, "--num-cpus", "1", "--block"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(NOTICE_S)},
    )
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):  # it has ended by itself, with its children
            kill_all(psutil.Process(process.pid).children(recursive=True))
        process.kill()
        process.wait()


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def find_drainable_node(command: Command) -> tuple[str, str, list[psutil.Process]]:
    """A worker on a node without controller and store, that node, and the node's processes."""
    for line in command.lines("WorkerReady"):
        processes = processes_of_node(line["pid"])
        if not hosts_controller_or_store(processes):
            return line["worker"], line["node"], processes
    raise AssertionError("the run needs every node")


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["dp=3", "fsdp=3"])
def test_workers_leave_a_draining_node_before_its_deadline(tmp_path: Path, layout: str) -> None:
    train = arguments("tiny", layout, f"2:{NUM_NODES}", NUM_STEPS)
    with train_on_nodes(tmp_path, *train, num_nodes=NUM_NODES) as command:
        command.wait_for_step(20)
        worker, node, processes = find_drainable_node(command)
        earliest, latest = drain(command.address, node)
        command.wait_until(lambda: len(command.lines("Resume")) >= 2, "a generation of the others")
        time.sleep(max(0.0, latest - time.time()))
        kill_all(processes)
        code, output = command.finish()
        assert code == 0, output
        assert_equals_plain_loop(command, "tiny", NUM_STEPS)
        [notice] = command.lines("NodeDraining")
        assert (notice["node"], notice["cause"]) == (node, "Ray drains it")
        assert earliest - 1.0 <= notice["deadline"] <= latest + 1.0
        resume = command.lines("Resume")[1]
        assert worker not in resume["workers"]
        assert resume["time"] < notice["deadline"]
        assert not [line for line in command.lines("Abort") if line["time"] < resume["time"]]


@pytest.mark.soak
def test_sigterm_of_a_pod_drains_its_node(tmp_path: Path) -> None:
    """On SIGTERM Ray drains its own node, without any knowledge of pods."""
    train = arguments("tiny", "dp=3", f"2:{NUM_NODES}", NUM_STEPS)
    with ExitStack() as stack:
        command = stack.enter_context(train_on_nodes(tmp_path, *train, num_nodes=NUM_NODES - 1))
        command.wait_until(lambda: command.lines("StoreReady"), "the store has its node")
        node = stack.enter_context(start_pod(command.address))
        command.wait_for_step(20)
        [worker] = [
            line["worker"]
            for line in command.lines("WorkerReady")
            if psutil.Process(node.pid) in psutil.Process(line["pid"]).parents()
        ]
        node.send_signal(signal.SIGTERM)
        command.wait_until(lambda: len(command.lines("Resume")) >= 2, "a generation of the others")
        node.wait(timeout=60)
        code, output = command.finish()
        assert code == 0, output
        assert_equals_plain_loop(command, "tiny", NUM_STEPS)
        [notice], resume = command.lines("NodeDraining"), command.lines("Resume")[1]
        assert worker not in resume["workers"]
        assert resume["time"] < notice["deadline"]
        assert not [line for line in command.lines("Abort") if line["time"] < resume["time"]]
