"""The mesh as it fills up with workers, and the nodes and racks that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from elastic.layout import Layout
from elastic.staying import Block


class Place(NamedTuple):
    """Where a worker runs: its node and, if labelled, its rack; both are failure domains."""

    node: str = ""
    rack: str = ""


Topology = Mapping[str, Place]
"""The place of each worker; one that is missing lies on a node without a name."""

Domain = tuple[str, str]
"""(rack, node), so that domains sort by rack first."""

Bundles = dict[Domain, list[Block]]
"""Whole blocks of free workers, by the node on which they lie, in sorted order."""


@dataclass(slots=True)
class Seating:
    """The mesh as it fills up: blocks by index, and who is still free on each node.

    What a block holds, its shard, is named by the block of replica 0 that holds the same.
    """

    layout: Layout
    domains: dict[str, Domain]
    blocks: dict[int, Block]
    free: dict[Domain, list[str]]

    def split(self, index: int) -> tuple[int, int]:
        """The `dp` index of a block, and its shard."""
        size = self.layout.fsdp * self.layout.cp
        dp = index // size % self.layout.dp
        return dp, index - dp * size

    def domain_of(self, block: Block) -> Domain:
        """Where a block lies, or the first of its workers if it crosses nodes."""
        return self.domains[next(worker for worker in block if worker)]

    def missing(self) -> list[int]:
        """The blocks that nobody fills yet."""
        num_blocks = self.layout.num_workers // self.layout.tp
        if len(self.blocks) == num_blocks:
            return []
        return [index for index in range(num_blocks) if index not in self.blocks]
