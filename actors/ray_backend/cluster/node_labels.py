"""Ray node labels: the rack, type and market of this node, and the placement of workers by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from elastic.geometry.topology import Place
from elastic.planner.market.exchange import ON_DEMAND

RACK_LABELS = ("rack", "ray.io/availability-zone")
"""The labels that name a node's rack; the first one present counts. A user sets the first by
`ray start --labels rack=r7`; clouds and KubeRay set the second."""
NODE_GROUP = "ray.io/node-group"
"""The label by which the autoscaler and KubeRay name a node's type."""
NODE_ID = "ray.io/node-id"
"""A label that every node has."""
MARKET = "ray.io/market-type"
"""The label by which KubeRay, or `labels` of a node type, names a machine's market: `spot` or
`on-demand`."""


def placement_labels(quarantined: Sequence[str], market: str) -> dict[str, Any]:
    """Options of an actor that starts on none of these nodes, and on a machine of this market; it
    waits for another node.

    A machine without the label counts as spot: so a cluster without on-demand machines needs none.
    """
    selector = {}
    if quarantined:
        selector[NODE_ID] = f"!in({','.join(sorted(quarantined))})"
    if market:
        selector[MARKET] = market if market == ON_DEMAND else f"!{ON_DEMAND}"
    return {"label_selector": selector} if selector else {}


def place_here() -> Place:
    """The node and rack of this process."""
    context = ray.get_runtime_context()
    labels = context.get_node_labels()
    racks = [labels[key] for key in RACK_LABELS if key in labels]
    return Place(context.get_node_id(), *racks[:1])


def head_host() -> str:
    """The address by which this machine reaches the head, where the store is."""
    host: str = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    return host.strip("[]")


def node_type_here() -> str:
    """The type of this node as the cluster launcher or KubeRay names it, or empty."""
    return str(ray.get_runtime_context().get_node_labels().get(NODE_GROUP, ""))


def market_here() -> str:
    """The market of this node, or empty if it has no label."""
    return str(ray.get_runtime_context().get_node_labels().get(MARKET, ""))
