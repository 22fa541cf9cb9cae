"""Who sits where: world ranks for a layout, so that little moves and neighbours lie close.

Ranks are dealt in blocks of `tp` consecutive ones, since a tp group must not cross a node
while any assignment avoids it. In this order:

1. Survivors stay at their coordinates if the model axes are the same (see `staying`).
2. A block that stayed but cannot be completed on one node is given up. A node of n workers
   still yields n // tp whole blocks, so this loses no block.
3. A gap in a replica gets free workers of the node (then rack) that holds the fewest copies
   of that shard; of these, one that holds other shards of the replica; then by (rack, node).
4. New replicas are filled whole. Dealing them round robin over racks and, within a rack, over
   nodes puts the copies of a shard in different failure domains and keeps each replica
   together. They take the free `dp` indices in order of (rack, node, name).
5. What is left for want of whole blocks goes to the ranks where it had stayed, then by (rack,
   node, name).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from elastic.assignment import Assignment
from elastic.layout import Layout
from elastic.staying import Block, stay


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
class _Seating:
    """The mesh as it fills up: blocks by index, and who is still free on each node."""

    layout: Layout
    domains: dict[str, Domain]
    blocks: dict[int, Block]
    free: dict[Domain, list[str]]

    @property
    def blocks_per_replica(self) -> int:
        """Within one pipeline stage."""
        return self.layout.fsdp * self.layout.cp

    def dp_index(self, block: int) -> int:
        return block // self.blocks_per_replica % self.layout.dp

    def shard(self, block: int) -> int:
        """Names what a block holds: the block of replica 0 that holds the same."""
        return block - self.dp_index(block) * self.blocks_per_replica

    def replica(self, dp_index: int) -> list[int]:
        """The blocks of a replica, in rank order."""
        size = self.blocks_per_replica
        firsts = ((pp * self.layout.dp + dp_index) * size for pp in range(self.layout.pp))
        return [block for first in firsts for block in range(first, first + size)]


def seat(
    layout: Layout, previous: Assignment | None, members: Collection[str], topology: Topology
) -> tuple[str, ...]:
    """World ranks 0, 1, ... for as many of the members as the layout has ranks.

    The same whatever the order of `members`; there are at least `layout.num_workers`.
    """
    stayed = stay(layout, previous, set(members))
    domains = {worker: topology.get(worker, Place())[::-1] for worker in sorted(members)}
    seated = set(chain.from_iterable(stayed.values()))
    seating = _Seating(layout, domains, dict(stayed), {})
    for worker, domain in domains.items():
        if worker not in seated:
            seating.free.setdefault(domain, []).append(worker)
    _give_up_torn_blocks(seating)
    bundles = _cut_bundles(seating)
    _fill_gaps(seating, bundles)
    _fill_new_replicas(seating, bundles)
    _fill_the_rest(seating, bundles, stayed)
    num_blocks = layout.num_workers // layout.tp
    ranks = chain.from_iterable(seating.blocks[index] for index in range(num_blocks))
    return tuple(worker for worker in ranks if worker is not None)


def _give_up_torn_blocks(seating: _Seating) -> None:
    """Complete on its node each block that stayed, or set its workers free."""
    if seating.layout.tp == 1:
        return
    torn: dict[Domain, list[int]] = {}
    for index, block in sorted(seating.blocks.items()):
        domains = sorted({seating.domains[worker] for worker in block if worker})
        if len(domains) > 1:
            _set_free(seating, index)
        elif None in block:
            torn.setdefault(domains[0], []).append(index)
    for domain, indices in torn.items():
        _complete(seating, domain, indices)


def _complete(seating: _Seating, domain: Domain, torn: Iterable[int]) -> None:
    """Fill the torn blocks of one node from its free workers, those with fewest gaps first."""
    left = sorted(torn, key=lambda index: (seating.blocks[index].count(None), index))
    while sum(seating.blocks[index].count(None) for index in left) > len(
        seating.free.get(domain, ())
    ):
        _set_free(seating, left.pop())
    for index in left:
        free = seating.free[domain]
        seating.blocks[index] = [worker or free.pop(0) for worker in seating.blocks[index]]


def _set_free(seating: _Seating, index: int) -> None:
    for worker in seating.blocks.pop(index):
        if worker is not None:
            free = seating.free.setdefault(seating.domains[worker], [])
            free.append(worker)
            free.sort()


def _cut_bundles(seating: _Seating) -> Bundles:
    """The whole blocks that each node can still give."""
    tp = seating.layout.tp
    return {
        domain: [list(free[first : first + tp]) for first in range(0, len(free) - tp + 1, tp)]
        for domain, free in sorted(seating.free.items())
        if len(free) >= tp
    }


def _fill_gaps(seating: _Seating, bundles: Bundles) -> None:
    """Complete the replicas of which some blocks stayed."""
    started = sorted({seating.dp_index(index) for index in seating.blocks})
    gaps = [i for dp in started for i in seating.replica(dp) if i not in seating.blocks]
    if not gaps:
        return
    copies: Counter[tuple[int, Domain | str]] = Counter()
    neighbours: set[tuple[int, Domain]] = set()

    def note(index: int) -> None:
        shard, worker = seating.shard(index), seating.blocks[index][0]
        domain = seating.domains[worker or ""]
        copies.update(((shard, domain), (shard, domain[0])))
        neighbours.add((seating.dp_index(index), domain))

    for index in seating.blocks:
        note(index)
    for index in gaps:
        if not bundles:
            return
        shard, dp = seating.shard(index), seating.dp_index(index)
        domain = min(
            bundles,
            key=lambda d: (copies[shard, d], copies[shard, d[0]], (dp, d) not in neighbours, d),
        )
        seating.blocks[index] = _take(bundles, domain)
        note(index)


def _take(bundles: Bundles, domain: Domain) -> Block:
    block = bundles[domain].pop(0)
    if not bundles[domain]:
        del bundles[domain]
    return block


def _fill_new_replicas(seating: _Seating, bundles: Bundles) -> None:
    """Fill the replicas of which no block stayed, each from as few domains as may be."""
    started = {seating.dp_index(index) for index in seating.blocks}
    new = [dp for dp in range(seating.layout.dp) if dp not in started]
    size = seating.layout.pp * seating.blocks_per_replica
    racks: dict[str, list[list[Block]]] = {}
    for (rack, _), of_node in bundles.items():
        racks.setdefault(rack, []).append(of_node)
    queue = _deal([_deal(nodes, size) for nodes in racks.values()], size)[: len(new) * size]
    replicas = [queue[first : first + size] for first in range(0, len(queue), size)]
    replicas.sort(key=lambda blocks: (-len(blocks), seating.domains[blocks[0][0] or ""], blocks))
    for dp, blocks in zip(new, replicas, strict=False):
        seating.blocks.update(zip(seating.replica(dp), blocks, strict=False))


def _deal(heaps: list[list[Block]], size: int) -> list[Block]:
    """All blocks in one row: round robin over the heaps, up to `size` at a time from each."""
    longest = max(map(len, heaps), default=0)
    rounds = range(0, longest, size)
    return [block for first in rounds for heap in heaps for block in heap[first : first + size]]


def _fill_the_rest(seating: _Seating, bundles: Bundles, stayed: dict[int, Block]) -> None:
    """Ranks for which no node had a whole block left."""
    num_blocks = seating.layout.num_workers // seating.layout.tp
    missing = [index for index in range(num_blocks) if index not in seating.blocks]
    if not missing:
        return
    seated = set(chain.from_iterable(seating.blocks.values()))
    left = dict.fromkeys(w for w in seating.domains if w not in seated)
    for index in missing:
        old = stayed.get(index) or [None] * seating.layout.tp
        seating.blocks[index] = [worker if worker in left else None for worker in old]
        for worker in seating.blocks[index]:
            left.pop(worker or "", None)
    rest = iter(sorted(left, key=lambda worker: (seating.domains[worker], worker)))
    for index in missing:
        seating.blocks[index] = [worker or next(rest) for worker in seating.blocks[index]]
