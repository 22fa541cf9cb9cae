"""The mesh as it fills up with workers, and the nodes and racks that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """Where a worker runs: its node and, if labelled, its rack; both are failure domains."""

    node: str = ""
    rack: str = ""


Topology = Mapping[str, Place]
"""The place of each worker; one that is missing lies on a node without a name."""

Domain = tuple[str, str]
"""(rack, node), so that domains sort by rack first."""
