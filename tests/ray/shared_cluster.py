"""One Ray cluster for all tests of a pytest run that need a cluster, but not one of their own.

`tests/ray/conftest.py` ends it with the pytest run. What a test leaves on it fails that test.
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
"""`RAY_NODE_TYPE_NAME` of its node, as an autoscaler sets it."""


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
        found = []
        for process in processes_of(self.folder):
            with suppress(psutil.NoSuchProcess):
                if process.name().startswith("ray::Ray"):
                    found.append(process)
        return found

    def await_end_of_actors(self, patience_s: float = PATIENCE_S) -> None:
        """Invariant 12: nothing of any run is left. What is left is killed, and fails the test."""
        deadline = time.monotonic() + patience_s
        while (left := self.actors()) and time.monotonic() < deadline:
            time.sleep(0.2)
        names = [process.name() for process in left]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert not names, f"left behind: {names}"


@cache
def _empty_tracking_store() -> bytes:
    """MLflow runs all its migrations to make one, for four seconds of processor."""
    with TemporaryDirectory() as folder:
        database = Path(folder, "mlflow.db")
        MlflowClient(f"sqlite:///{database}").search_experiments(max_results=1)
        return database.read_bytes()


def make_tracking_store(storage: Path) -> None:
    """As an earlier run of this storage leaves it. Tests on their own clusters begin without."""
    storage.mkdir(parents=True, exist_ok=True)
    if not (storage / "mlflow.db").exists():
        (storage / "mlflow.db").write_bytes(_empty_tracking_store())


_cluster: list[SharedCluster] = []
_to_close = ExitStack()


def shared_cluster() -> SharedCluster:
    """The cluster of this pytest run; the first call starts it."""
    if not _cluster:
        _cluster.append(_to_close.enter_context(_started()))
    return _cluster[0]


def close_shared_cluster() -> None:
    """End it, if it was started."""
    _cluster.clear()
    _to_close.close()


@contextmanager
def _started() -> Iterator[SharedCluster]:
    with ray_folder() as folder:
        ours = {"RAY_TMPDIR": folder, "RAY_NODE_TYPE_NAME": NODE_TYPE}
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        made = Path(folder, "ray")
        made.mkdir()
        head = {"num_cpus": NUM_CPUS, "temp_dir": str(made)}
        try:
            cluster = Cluster(initialize_head=True, head_node_args=head)
        finally:
            for name, value in before.items():
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
    """`elastic train ARGUMENTS` with run name `run` on the shared cluster; at the end nothing of
    the run may be left."""
    with on_shared_cluster("train", storage, *arguments, "--run-name", "run") as command:
        yield command


@contextmanager
def on_shared_cluster(name: str, storage: Path, *arguments: str) -> Iterator[Command]:
    """Start a command on the shared cluster; at the end no actor may be left there."""
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
