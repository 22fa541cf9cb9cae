"""Where a Ray actor's process runs: its node and, by the node's labels, its rack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from elastic.geometry.topology import Place

RACK_LABELS = ("rack", "ray.io/availability-zone")
"""The first that a node has: `ray start --labels rack=r7`; clouds and KubeRay set the second."""

NODE_GROUP = "ray.io/node-group"
"""The label in which the autoscaler and KubeRay say of which type a node is."""


NODE_ID = "ray.io/node-id"
"""The label that every node has."""


def away_from(nodes: Sequence[str]) -> dict[str, Any]:
    """Options of an actor that is started on none of these nodes, and waits for another."""
    if not nodes:
        return {}
    return {"label_selector": {NODE_ID: f"!in({','.join(sorted(nodes))})"}}


def place_here() -> Place:
    found = ray.get_runtime_context()
    labels = found.get_node_labels()
    racks = [labels[key] for key in RACK_LABELS if key in labels]
    return Place(found.get_node_id(), *racks[:1])


def head_host() -> str:
    """The head's address, as this machine reaches it; the store is there."""
    host: str = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    return host.strip("[]")


def node_type_here() -> str:
    """As the cluster's launcher or KubeRay calls it; empty where nobody does."""
    return str(ray.get_runtime_context().get_node_labels().get(NODE_GROUP, ""))
