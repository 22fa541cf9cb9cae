"""Topology: the node and the rack of each worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """The node of a worker and, if labelled, its rack; both are failure domains."""

    node: str = ""
    rack: str = ""


Topology = Mapping[str, Place]
"""The place of each worker; a worker without an entry runs on a node without a name."""

Domain = tuple[str, str]
"""A failure domain as (rack, node), so that domains sort by rack first."""
