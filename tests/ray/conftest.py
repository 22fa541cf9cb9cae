"""Ends the Ray cluster that the tests of a pytest run share.

Ray starts its workers with niceness 15: beside the other tests of the same machine they would wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from shared_cluster import SharedCluster, close_shared_cluster, shared_cluster

os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="session", autouse=True)
def _shared_cluster_ends() -> Iterator[None]:
    yield
    close_shared_cluster()


@pytest.fixture
def cluster_of_all() -> Iterator[SharedCluster]:
    """The shared cluster; at the end of the test nothing of any run may be left on it."""
    cluster = shared_cluster()
    yield cluster
    cluster.await_end_of_actors()
