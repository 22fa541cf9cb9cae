"""Ends the Ray cluster that the tests of a pytest run share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shared_cluster import SharedCluster, close_shared_cluster, shared_cluster


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
