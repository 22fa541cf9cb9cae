"""Detached runs, which no driver ends, while their controller restarts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import pytest
import ray
from command_line import Command
from shared_cluster import NUM_CPUS, SharedCluster
from test_controller_death import wait_for
from test_model_axes import arguments

from actors.controller.start_guard import STORAGE_PATIENCE_S
from actors.ray_backend.actor_names import actor_names, end_actors, find_actors

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
ORPHANS_END_S = 300.0
"""The default of `failure.orphan_timeout_s`."""


@pytest.fixture
def joined(shared_ray_cluster: SharedCluster) -> Iterator[SharedCluster]:
    ray.init(address=shared_ray_cluster.address, namespace="elastic", log_to_driver=False)
    yield shared_ray_cluster
    end_actors("run")
    ray.shutdown()


def start_detached(cluster: SharedCluster, storage: Path, *run: str) -> Command:
    command = cluster.start(storage, *run, "--detach")
    code, output = command.finish()
    assert code == 0, output
    wait_for(lambda: len(command.metrics()) >= 10, "step 10")
    return command


@pytest.mark.soak
def test_controller_that_cannot_take_a_run_over_ends_also_its_pending_workers(
    tmp_path: Path, joined: SharedCluster
) -> None:
    """Else a worker that waits for a machine is demand for the autoscaler, for ever."""

    @ray.remote(num_cpus=NUM_CPUS - 2)
    class OtherUser:
        def is_running(self) -> bool:
            return True

    other = OtherUser.remote()
    assert ray.get(other.is_running.remote())
    command = start_detached(joined, tmp_path, *arguments("tiny", "dp=2", "2:3", 1_000_000))
    assert set(find_actors("run")) == {"w0", "w1", "w2"}
    assert len(command.lines("WorkerReady")) == 2
    command.kill_controller()
    rmtree(command.folder / "lease")  # so that the next controller is refused
    deadline = time.monotonic() + ORPHANS_END_S / 2
    while (names := actor_names()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert names == []
    assert not command.lines("ControllerRestarted")
    ray.kill(other)


@pytest.mark.soak
def test_run_outlives_storage_that_is_away_for_longer_than_a_driver_would_wait(
    tmp_path: Path, joined: SharedCluster
) -> None:
    """The restarted controller waits for storage; meanwhile the workers train on."""
    run = (*arguments("tiny", "dp=2", "2:2", 1_000_000), "--set", "failure.orphan_timeout_s=30")
    command = start_detached(joined, tmp_path, *run)
    lease, away = command.folder / "lease", command.folder / "lease.away"
    command.kill_controller()
    lease.rename(away)
    lease.write_text("not a folder")
    time.sleep(STORAGE_PATIENCE_S + 20.0)
    lease.unlink()
    away.rename(lease)
    wait_for(lambda: command.lines("ControllerRestarted"), "the restart of the controller")
    known = command.metrics()[-1]["step"]
    wait_for(lambda: command.metrics()[-1]["step"] > known, "a step after the restart")
    assert not command.lines("WorkerLost")
    assert len({line["pid"] for line in command.lines("WorkerReady")}) == 2
