"""What the nodes of a Ray cluster run, and what their clocks show: asked by a task on each."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.ray_backend.driver import join_cluster_at_hand
from actors.runtime.sources import digest_of_sources

PATIENCE_S = 60.0
"""For a process to be started and torch to be imported there."""
NUM_TRIES = 3
"""Of which the quickest answer tells the time."""


@dataclass(frozen=True)
class NodeSeen:
    """A living node; `told` is its clock between two moments of ours, seconds since the epoch.

    `trouble` says why it could not be asked, or is empty.
    """

    address: str
    resources: dict[str, float]
    software: dict[str, str] = field(default_factory=dict)
    told: float | None = None
    between: tuple[float, float] = (0.0, 0.0)
    trouble: str = ""


def own_software() -> dict[str, str]:
    """What must be the same on all machines of a run."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": ray.__version__,
        "sources": digest_of_sources(),
    }


def see_nodes(address: str | None, namespace: str) -> list[NodeSeen] | None:
    """Of the cluster at `address`, or the one at hand; None if there is none.

    Joins it and leaves it again. Raises OSError if an address is named and nobody answers there.
    """
    was_there = ray.is_initialized()
    if not was_there and not join_cluster_at_hand(address, namespace):
        return None
    try:
        living = sorted(
            (node for node in ray.nodes() if node["Alive"]), key=lambda n: n["NodeManagerAddress"]
        )
        return [_see(node) for node in living]
    finally:
        if not was_there:
            ray.shutdown()


def _see(node: dict[str, Any]) -> NodeSeen:
    address, resources = node["NodeManagerAddress"], node["Resources"]
    task = ray.remote(_answer).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
    )
    answers = []
    try:
        for _ in range(NUM_TRIES):
            asked = time.time()
            software, told = ray.get(task.remote(), timeout=PATIENCE_S)
            answers.append((time.time() - asked, asked, told, software))
    except ray.exceptions.RayError as error:
        return NodeSeen(address, resources, trouble=str(error).strip().splitlines()[-1])
    took, asked, told, software = min(answers, key=lambda answer: answer[0])
    return NodeSeen(address, resources, software, told, (asked, asked + took))


def _answer() -> tuple[dict[str, str], float]:
    return own_software(), time.time()
