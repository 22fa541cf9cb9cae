"""Gang back-off: a run that cannot get its minimum of workers releases all of them and retries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from command_line import Command
from shared_cluster import NUM_CPUS, SharedCluster
from test_controller_death import wait_for
from test_model_axes import arguments

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
NUM_STEPS = 30
SHORT_GANG_TIMEOUT = ("--set", "growth.gang_timeout_s=15")


@pytest.fixture
def joined(shared_ray_cluster: SharedCluster) -> Iterator[SharedCluster]:
    ray.init(address=shared_ray_cluster.address, namespace="elastic", log_to_driver=False)
    yield shared_ray_cluster
    ray.shutdown()


def start_run(
    cluster: SharedCluster, storage: Path, num_workers: int, name: str = "run"
) -> Command:
    """A run that needs `num_workers` CPUs."""
    run = arguments("tiny", f"dp={num_workers}", f"{num_workers}:{num_workers}", NUM_STEPS)
    return cluster.start(storage, *run, *SHORT_GANG_TIMEOUT, name=name)


def assert_trained(command: Command) -> None:
    code, output = command.finish()
    assert code == 0, output
    assert [line["step"] for line in command.metrics()] == list(range(1, NUM_STEPS + 1))


@pytest.mark.soak
def test_all_workers_are_released_and_requested_again(
    tmp_path: Path, joined: SharedCluster
) -> None:
    @ray.remote(num_cpus=NUM_CPUS - 2)
    class OtherJob:
        def is_running(self) -> bool:
            return True

    other_job = OtherJob.remote()
    assert ray.get(other_job.is_running.remote())
    command = start_run(joined, tmp_path, num_workers=3)
    command.wait_until(lambda: len(command.lines("WorkerReady")) == 2, "two of three workers")
    command.wait_until(lambda: len(command.lines("WorkerLost")) == 3, "the end of all three")
    wait_for(lambda: ray.available_resources().get("CPU") == 2, "free CPUs")
    causes = {line["cause"] for line in command.lines("StopWorker")}
    assert causes == {"too few other workers arrived"}
    ray.kill(other_job)
    assert_trained(command)
    assert not command.lines("Abort")


@pytest.mark.soak
def test_two_runs_that_exceed_the_cluster_complete_one_after_the_other(
    tmp_path: Path, shared_ray_cluster: SharedCluster
) -> None:
    """Each run needs more than half of the cluster, so only one can train at a time."""
    commands = [
        start_run(shared_ray_cluster, tmp_path / name, NUM_CPUS // 2 + 1, name)
        for name in ("one", "two")
    ]
    for command in commands:
        assert_trained(command)
