"""Software versions and clocks of a cluster's nodes, queried by a Ray task on each."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.ray_backend.driver import join_existing_cluster
from actors.runtime.code_digest import digest_of_sources

PATIENCE_S = 60.0
"""The time for a process to start and import torch on a node."""
NUM_TRIES = 3
"""The number of queries to a node; the fastest answer gives the time."""


@dataclass(frozen=True)
class NodeReport:
    """A living node. `clock_s` is its clock, read between the two times `queried_between` of this
    machine's clock, in seconds since the epoch. `trouble` says why the query failed, or is
    empty."""

    address: str
    resources: dict[str, float]
    software: dict[str, str] = field(default_factory=dict)
    clock_s: float | None = None
    queried_between: tuple[float, float] = (0.0, 0.0)
    trouble: str = ""


def software_versions() -> dict[str, str]:
    """The versions that must be the same on all machines of a run."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": ray.__version__,
        "sources": digest_of_sources(),
    }


def query_nodes(address: str | None, namespace: str) -> list[NodeReport] | None:
    """Query the nodes of the cluster at `address`, or of the recorded one; None if there is none.

    This joins the cluster and leaves it again. Raises OSError if an address is given and nothing
    answers there.
    """
    was_joined = ray.is_initialized()
    if not was_joined and not join_existing_cluster(address, namespace):
        return None
    try:
        living = sorted(
            (node for node in ray.nodes() if node["Alive"]), key=lambda n: n["NodeManagerAddress"]
        )
        return [_see(node) for node in living]
    finally:
        if not was_joined:
            ray.shutdown()


def _see(node: dict[str, Any]) -> NodeReport:
    address, resources = node["NodeManagerAddress"], node["Resources"]
    task = ray.remote(_answer).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
    )
    answers = []
    try:
        for _ in range(NUM_TRIES):
            sent_at = time.time()
            software, clock = ray.get(task.remote(), timeout=PATIENCE_S)
            answers.append((time.time() - sent_at, sent_at, clock, software))
    except ray.exceptions.RayError as error:
        return NodeReport(address, resources, trouble=str(error).strip().splitlines()[-1])
    took_s, sent_at, clock, software = min(answers, key=lambda answer: answer[0])
    return NodeReport(address, resources, software, clock, (sent_at, sent_at + took_s))


def _answer() -> tuple[dict[str, str], float]:
    return software_versions(), time.time()
