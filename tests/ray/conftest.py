"""Fixtures of the Ray tests: the cluster that the tests of a pytest run share.

By default Ray starts its workers with niceness 15, so other tests on the machine would delay them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from shared_cluster import SharedCluster, close_shared_cluster, shared_cluster

os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="session", autouse=True)
def _close_shared_cluster() -> Iterator[None]:
    yield
    close_shared_cluster()


@pytest.fixture
def shared_ray_cluster() -> Iterator[SharedCluster]:
    """The shared cluster; at the end of the test, assert that no run has left a process on it."""
    cluster = shared_cluster()
    yield cluster
    cluster.await_end_of_actors()
