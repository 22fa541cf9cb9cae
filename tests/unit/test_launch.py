"""Joining a cluster that is not there."""

from __future__ import annotations

import socket
import time

import pytest
import ray

from actors.launch import join_cluster, join_or_start_cluster


@pytest.fixture
def unanswered() -> str:
    """An address where nobody listens: the port has just been given back."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def test_it_is_told_at_once_and_no_other_is_started(unanswered: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        join_or_start_cluster(unanswered, 1, use_gpus=False, namespace="elastic")
    with pytest.raises(ConnectionRefusedError):
        join_cluster(unanswered, "elastic")
    assert time.monotonic() - began < 5.0, "Ray alone would try for a minute"
    assert not ray.is_initialized()


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_host_of_no_such_name(scheme: str) -> None:
    with pytest.raises(OSError):
        join_or_start_cluster(f"{scheme}nowhere.invalid:6379", 1, False, "elastic")
    assert not ray.is_initialized()
