"""Quarantine of a node of a real Ray cluster on which workers crash repeatedly."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from command_line import Command, elastic
from test_model_axes import arguments
from test_ray_notices import find_drainable_node, start_pod
from test_ray_parity import train_on_nodes

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]


def workers_under(raylet: psutil.Process) -> set[int]:
    """The processes of the workers under a raylet, ready or not."""
    return {c.pid for c in raylet.children() if c.name().startswith("ray::RayWorker")}


def kill_next_worker(command: Command, raylet: psutil.Process, killed: set[int]) -> None:
    command.wait_until(lambda: workers_under(raylet) - killed, "a worker on the node")
    for pid in workers_under(raylet) - killed:
        killed.add(pid)
        psutil.Process(pid).send_signal(signal.SIGKILL)
    command.wait_until(
        lambda: len(command.lines("WorkerLost")) == len(killed), "the report of the loss"
    )


def test_quarantined_node_gets_no_replacements(tmp_path: Path) -> None:
    """One worker dies while it trains, two while they start. The fourth waits for another node."""
    train = arguments("tiny", "dp=2", "1:2", 100_000)
    with train_on_nodes(tmp_path, *train, num_nodes=2) as command:
        command.wait_for_step(5)
        worker, bad_node, processes = find_drainable_node(command)
        killed: set[int] = set()
        for _ in range(3):
            kill_next_worker(command, processes[-1], killed)
        command.wait_until(lambda: command.lines("NodeQuarantined"), "the quarantine")
        assert [line["node"] for line in command.lines("WorkerLost")] == 3 * [bad_node]
        assert [line["node"] for line in command.lines("NodeQuarantined")] == [bad_node]
        command.wait_until(
            lambda: command.lines("StartWorkers")[-1]["quarantined"], "the next start"
        )
        status_page = elastic("status", "run", "--storage", str(tmp_path)).stdout
        assert (
            f"node {bad_node[:15]}… is quarantined: workers have crashed there 3 times"
            in status_page
        )
        command.wait_for_step(len(command.metrics()) + 5)
        [waiting_worker] = command.lines("StartWorkers")[-1]["workers"]
        ready = {line["worker"]: line["node"] for line in command.lines("WorkerReady")}
        assert waiting_worker not in ready, "no other node has a free CPU"
        with start_pod(command.address):
            command.wait_until(
                lambda: waiting_worker in command.lines("Resume")[-1]["workers"],
                "the worker on another node",
            )
            ready = {line["worker"]: line["node"] for line in command.lines("WorkerReady")}
            assert ready[waiting_worker] not in (bad_node, ready["w0" if worker == "w1" else "w1"])
            command.process.terminate()
            code, output = command.finish()
        assert code == 143, output
        steps = [line["step"] for line in command.metrics()]
        assert steps == list(range(1, len(steps) + 1)), "no step is repeated"
