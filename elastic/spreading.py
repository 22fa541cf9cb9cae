"""Blocks for the gaps and the new replicas of a mesh, spread over failure domains.

A gap in a replica gets free workers of the node (then rack) that holds the fewest copies of
that shard; of these, one that holds other shards of the replica; then by (rack, node).

New replicas are filled whole, round robin over racks and, within a rack, over nodes; those
that hold replicas already have had their turns. So copies of a shard come to lie in different
failure domains, while each replica stays together. They take the free `dp` indices in order
of (rack, node, name).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from elastic.seating import Bundles, Domain, Seating
from elastic.staying import Block

LOOK_AHEAD = 16
"""So many nodes are compared for each gap: enough for any usual loss, and never quadratic."""


def fill_gaps(seating: Seating, bundles: Bundles) -> None:
    """Complete the replicas of which some blocks stayed."""
    missing = seating.missing()
    if not missing or not seating.blocks:
        return
    copies: Counter[tuple[int, Domain | str]] = Counter()
    neighbours: set[tuple[int, Domain]] = set()
    started = set()

    def note(index: int) -> None:
        dp, shard = seating.split(index)
        domain = seating.domain_of(seating.blocks[index])
        copies[shard, domain] += 1
        copies[shard, domain[0]] += 1
        neighbours.add((dp, domain))
        started.add(dp)

    for index in seating.blocks:
        note(index)
    for index in missing:
        dp, shard = seating.split(index)
        if dp in started and bundles:
            domain = min(
                islice(bundles, LOOK_AHEAD),
                key=lambda d: (copies[shard, d], copies[shard, d[0]], (dp, d) not in neighbours),
            )
            seating.blocks[index] = _take(bundles, domain)
            note(index)


def _take(bundles: Bundles, domain: Domain) -> Block:
    block = bundles[domain].pop(0)
    if not bundles[domain]:
        del bundles[domain]
    return block


def fill_new_replicas(seating: Seating, bundles: Bundles) -> None:
    """Fill the replicas of which no block stayed, each from as few domains as may be."""
    new: dict[int, list[int]] = {}
    for index in seating.missing():
        new.setdefault(seating.split(index)[0], []).append(index)
    size = seating.layout.pp * seating.layout.fsdp * seating.layout.cp
    queue = _deal_over_domains(seating, bundles, size)[: len(new) * size]
    replicas = [queue[first : first + size] for first in range(0, len(queue), size)]
    replicas.sort(key=lambda blocks: (-len(blocks), seating.domains[blocks[0][0] or ""], blocks))
    for indices, blocks in zip(new.values(), replicas, strict=False):
        seating.blocks.update(zip(indices, blocks, strict=False))


def _deal_over_domains(seating: Seating, bundles: Bundles, size: int) -> list[Block]:
    """All bundles in the order in which new replicas of so many blocks take them."""
    homes = Counter(_homes(seating)) if bundles else Counter()
    racks: dict[str, list[tuple[int, list[Block]]]] = {}
    for domain, of_node in bundles.items():
        racks.setdefault(domain[0], []).append((homes[domain], of_node))
    return _deal([(homes[rack], _deal(nodes, size)) for rack, nodes in racks.items()], size)


def _homes(seating: Seating) -> Iterable[Domain | str]:
    """Each node and each rack, once for each replica of which it holds a block."""
    pairs: dict[tuple[int, Domain | str], None] = {}
    for index, block in seating.blocks.items():
        dp, domain = seating.split(index)[0], seating.domain_of(block)
        pairs[dp, domain] = pairs[dp, domain[0]] = None
    return (domain for _, domain in pairs)


def _deal(heaps: Iterable[tuple[int, list[Block]]], size: int) -> list[Block]:
    """All blocks in one row: round robin over the heaps, up to `size` at a time from each.

    A heap is left out for as many rounds as its number says: it has had its turns.
    """
    parts = [
        (num_turns + first // size, order, blocks[first : first + size])
        for order, (num_turns, blocks) in enumerate(heaps)
        for first in range(0, len(blocks), size)
    ]
    return [block for _, _, part in sorted(parts) for block in part]
