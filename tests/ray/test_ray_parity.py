"""Loss of a node of a real Ray cluster: its shards are rebuilt from parity."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from command_line import Command, ray_folder, start
from ray.cluster_utils import Cluster
from test_model_axes import arguments
from test_ray_snapshots import assert_recovered_from_snapshots, has_complete_snapshots

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]
NUM_NODES = 4
NUM_STEPS = 120


@contextmanager
def train_on_nodes(storage: Path, *train: str, num_nodes: int = NUM_NODES) -> Iterator[Command]:
    """`elastic train` on a cluster of `num_nodes` nodes with one CPU each."""
    with ray_folder() as folder:
        head = {"num_cpus": 1, "temp_dir": folder, "labels": {"rack": "r0"}}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for number in range(1, num_nodes):
            cluster.add_node(num_cpus=1, labels={"rack": f"r{number}"})
        arguments = (*train, "--run-name", "run")
        command = start("train", storage, folder, cluster.address, *arguments)
        try:
            yield command
        finally:
            command.process.kill()
            command.process.communicate()
            cluster.shutdown()


def processes_of_node(pid: int) -> list[psutil.Process]:
    """The processes of a process's node: the raylet's children, then the raylet."""
    raylet = psutil.Process(pid).parent()
    assert raylet is not None
    return [*raylet.children(recursive=True), raylet]


def hosts_controller_or_store(processes: list[psutil.Process]) -> bool:
    """Whether the run's controller or store is on that node."""
    names = {process.name().removeprefix("ray::") for process in processes}
    return bool(names & {"RayController", "RayStore"})


def test_loss_of_a_node_recovers_from_snapshots(tmp_path: Path) -> None:
    train = arguments("tiny", "fsdp=4", "2:4", NUM_STEPS)
    with train_on_nodes(tmp_path, *train, "--set", "snapshot.redundancy=xor:3") as command:
        command.wait_until(lambda: has_complete_snapshots(command, 1), "the first snapshots")
        [order] = command.lines("StartSnapshots")
        assert [len(workers) for workers in order["sets"]] == [NUM_NODES]
        assert {len(snapshot_servers) for snapshot_servers in order["snapshot_servers"]} == {1}
        racks = {line["rack"] for line in command.lines("WorkerReady")}
        assert racks == {f"r{number}" for number in range(NUM_NODES)}
        assert {server["rack"] for [server] in order["snapshot_servers"]} == racks
        nodes = (processes_of_node(line["pid"]) for line in command.lines("WorkerReady"))
        for process in next(node for node in nodes if not hosts_controller_or_store(node)):
            process.send_signal(signal.SIGKILL)
        code, output = command.finish()
        assert code == 0, output
        assert_recovered_from_snapshots(command, NUM_STEPS)
