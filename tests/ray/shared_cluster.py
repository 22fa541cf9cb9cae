"""The Ray cluster shared by all tests of a pytest run that need no private one.

`tests/ray/conftest.py` ends it with the pytest run. A test that leaves an actor on it fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from command_line import PATIENCE_S, Command, processes_of, ray_folder, start
from mlflow import MlflowClient
from ray.cluster_utils import Cluster

NUM_CPUS = 8
NODE_TYPE = "small"
"""The `RAY_NODE_TYPE_NAME` of its node, which an autoscaler would set."""


@dataclass(frozen=True)
class SharedCluster:
    """A cluster of one node that outlives commands."""

    address: str
    folder: str

    def start(self, storage: Path, *arguments: str, name: str = "run") -> Command:
        """Start `elastic train ARGUMENTS` on it."""
        train = (*arguments, "--run-name", name)
        make_tracking_store(storage)
        command = start("train", storage, self.folder, self.address, *train)
        command.folder = storage / name
        return command

    def actors(self) -> list[psutil.Process]:
        """The processes of all runs' actors."""
        actors = []
        for process in processes_of(self.folder):
            with suppress(psutil.NoSuchProcess):
                if process.name().startswith("ray::Ray"):
                    actors.append(process)
        return actors

    def await_end_of_actors(self, patience_s: float = PATIENCE_S) -> None:
        """Assert invariant 12: no run has left an actor. Kill those that are left, and fail."""
        deadline = time.monotonic() + patience_s
        while (remaining := self.actors()) and time.monotonic() < deadline:
            time.sleep(0.2)
        names = [process.name() for process in remaining]
        for process in remaining:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert not names, f"left behind: {names}"


@cache
def _empty_tracking_store() -> bytes:
    """An empty MLflow database. MLflow runs all its migrations to create one, which takes four
    seconds of CPU time."""
    with TemporaryDirectory() as folder:
        database = Path(folder, "mlflow.db")
        MlflowClient(f"sqlite:///{database}").search_experiments(max_results=1)
        return database.read_bytes()


def make_tracking_store(storage: Path) -> None:
    """Create the MLflow store, as an earlier run of this storage would. Tests on private clusters
    begin without one."""
    storage.mkdir(parents=True, exist_ok=True)
    if not (storage / "mlflow.db").exists():
        (storage / "mlflow.db").write_bytes(_empty_tracking_store())


_cluster: list[SharedCluster] = []
_to_close = ExitStack()


def shared_cluster() -> SharedCluster:
    """The cluster of this pytest run; the first call starts it."""
    if not _cluster:
        _cluster.append(_to_close.enter_context(_start_cluster()))
    return _cluster[0]


def close_shared_cluster() -> None:
    """End the cluster, if it was started."""
    _cluster.clear()
    _to_close.close()


@contextmanager
def _start_cluster() -> Iterator[SharedCluster]:
    with ray_folder() as folder:
        variables = {"RAY_TMPDIR": folder, "RAY_NODE_TYPE_NAME": NODE_TYPE}
        old_values = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        ray_temp_folder = Path(folder, "ray")
        ray_temp_folder.mkdir()
        head = {"num_cpus": NUM_CPUS, "temp_dir": str(ray_temp_folder)}
        try:
            cluster = Cluster(initialize_head=True, head_node_args=head)
        finally:
            for name, value in old_values.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        try:
            yield SharedCluster(cluster.address, folder)
        finally:
            cluster.shutdown()


@contextmanager
def elastic_train(storage: Path, *arguments: str) -> Iterator[Command]:
    """Start `elastic train ARGUMENTS` with run name `run` on the shared cluster; at the end, assert
    that no actor is left."""
    with on_shared_cluster("train", storage, *arguments, "--run-name", "run") as command:
        yield command


@contextmanager
def on_shared_cluster(name: str, storage: Path, *arguments: str) -> Iterator[Command]:
    """Start a command on the shared cluster; at the end, assert that no actor is left there."""
    cluster = shared_cluster()
    make_tracking_store(storage)
    command = start(name, storage, cluster.folder, cluster.address, *arguments)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()
        cluster.await_end_of_actors()
