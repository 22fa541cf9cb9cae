"""Placement: world ranks for the members, such that little state moves and neighbours lie close.

Ranks are placed in blocks of `tp` consecutive ranks, because a tp group must not cross a node
while any assignment avoids it. `place_workers` fills the blocks in this order:

1. Survivors keep their coordinates if the model axes are unchanged. If `fsdp` has changed, a
   survivor takes a shard that overlaps its old shard.
2. A survivors' block that cannot be completed on one node is dissolved. A node of n workers still
   yields n // tp whole blocks, so this loses no block.
3. Whole blocks of free workers fill gaps in replicas and then new replicas. Copies of one shard
   are spread over failure domains; the blocks of one replica lie in few.
4. If no node has a whole block left, the remaining workers fill the remaining ranks: survivors
   their own ranks first, then the others by (rack, node, name).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
from typing import NamedTuple

from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.topology import Domain, Place, Topology

RankBlock = list[str | None]
"""The workers of `tp` consecutive ranks; None is a gap."""

FreeBlocks = dict[Domain, list[RankBlock]]
"""Whole blocks of free workers, by the node on which they lie, in sorted order."""

NUM_COMPARED_NODES = 16
"""Nodes compared for each gap: enough for any usual loss, and never quadratic."""


@dataclass(slots=True)
class PartialPlacement:
    """The mesh while it fills up: blocks by index, and the free workers of each node.

    The shard that a block holds is named by the block of replica 0 that holds the same shard.
    """

    layout: Layout
    domains: dict[str, Domain]
    blocks: dict[int, RankBlock]
    free: dict[Domain, list[str]]

    def split(self, index: int) -> tuple[int, int]:
        """The `dp` index of a block, and its shard."""
        size = self.layout.fsdp * self.layout.cp
        dp = index // size % self.layout.dp
        return dp, index - dp * size

    def domain_of(self, block: RankBlock) -> Domain:
        """The domain of a block, or that of its first worker if the block crosses nodes."""
        return self.domains[next(worker for worker in block if worker)]

    def missing(self) -> list[int]:
        """The indices of the blocks that are not filled yet."""
        num_blocks = self.layout.num_workers // self.layout.tp
        if len(self.blocks) == num_blocks:
            return []
        return [index for index in range(num_blocks) if index not in self.blocks]


def place_workers(
    layout: Layout, previous: Assignment | None, members: Sequence[str], topology: Topology
) -> tuple[str, ...]:
    """The worker of each world rank, chosen from the members.

    `members` are sorted, distinct, and at least `layout.num_workers`.
    """
    survivors = _survivor_blocks(layout, previous, set(members))
    unknown = Place()
    domains = {worker: topology.get(worker, unknown)[::-1] for worker in members}
    placed = set(chain.from_iterable(survivors.values()))
    partial = PartialPlacement(layout, domains, dict(survivors), {})
    for worker, domain in domains.items():
        if worker not in placed:
            partial.free.setdefault(domain, []).append(worker)
    _complete_or_dissolve(partial)
    free_blocks = _cut_free_blocks(partial)
    _fill_gaps(partial, free_blocks)
    _fill_new_replicas(partial, free_blocks)
    _fill_remaining_ranks(partial, survivors)
    num_blocks = layout.num_workers // layout.tp
    ranks = chain.from_iterable(partial.blocks[index] for index in range(num_blocks))
    return tuple(worker for worker in ranks if worker is not None)


# 1. Survivors keep their coordinates.


class _DisplacedBlock(NamedTuple):
    """A block of survivors whose own place is taken or no longer exists."""

    fsdp: int
    num_gaps: int
    workers: RankBlock


def _survivor_blocks(
    layout: Layout, previous: Assignment | None, members: Collection[str]
) -> dict[int, RankBlock]:
    """The blocks of the new mesh, by index, that survivors take over, with their gaps."""
    if previous is None or _model_axes(previous.layout) != _model_axes(layout):
        return {}
    blocks: dict[int, RankBlock] = {}
    displaced: dict[tuple[int, int], list[_DisplacedBlock]] = {}
    for (pp, dp, fsdp, cp), workers in _old_blocks(previous, members):
        target = (2 * fsdp + 1) * layout.fsdp // (2 * previous.layout.fsdp)
        index = ((pp * layout.dp + dp) * layout.fsdp + target) * layout.cp + cp
        if dp < layout.dp and index not in blocks:
            blocks[index] = workers
        else:
            block = _DisplacedBlock(fsdp, workers.count(None), workers)
            displaced.setdefault((pp, cp), []).append(block)
    for (pp, cp), moving in displaced.items():
        in_order = sorted(moving, key=lambda block: (block.fsdp, block.num_gaps))
        _place_displaced(layout, previous.layout.fsdp, pp, cp, in_order, blocks)
    return blocks


def _model_axes(layout: Layout) -> tuple[int, int, int]:
    return layout.pp, layout.cp, layout.tp


def _old_blocks(
    previous: Assignment, members: Collection[str]
) -> list[tuple[tuple[int, ...], RankBlock]]:
    """The old blocks with at least one survivor, each with its (pp, dp, fsdp, cp)."""
    *degrees, tp = previous.layout.degrees
    survivors: RankBlock = [worker if worker in members else None for worker in previous.members]
    firsts = range(0, len(survivors), tp)
    return [
        (coordinates, block)
        for coordinates, first in zip(product(*map(range, degrees)), firsts, strict=True)
        if any(block := survivors[first : first + tp])
    ]


def _place_displaced(
    layout: Layout,
    old_fsdp: int,
    pp: int,
    cp: int,
    moving: Sequence[_DisplacedBlock],
    blocks: dict[int, RankBlock],
) -> None:
    """Match displaced blocks with free places whose shards overlap, in one sweep over `fsdp`."""
    free = (
        (fsdp, index)
        for fsdp, dp in product(range(layout.fsdp), range(layout.dp))
        if (index := ((pp * layout.dp + dp) * layout.fsdp + fsdp) * layout.cp + cp) not in blocks
    )
    fsdp, index = next(free, (layout.fsdp, -1))
    for block in moving:
        first = block.fsdp * layout.fsdp // old_fsdp
        last = ((block.fsdp + 1) * layout.fsdp - 1) // old_fsdp
        while fsdp < first:
            fsdp, index = next(free, (layout.fsdp, -1))
        if fsdp <= last:
            blocks[index] = block.workers
            fsdp, index = next(free, (layout.fsdp, -1))


# 2. Each block lies on one node.


def _complete_or_dissolve(partial: PartialPlacement) -> None:
    """Complete each survivors' block on its node, or free its workers."""
    if partial.layout.tp == 1:
        return
    incomplete: dict[Domain, list[int]] = {}
    for index, block in sorted(partial.blocks.items()):
        domains = {partial.domains[worker] for worker in block if worker}
        if len(domains) > 1:
            _dissolve(partial, index)
        elif None in block:
            incomplete.setdefault(domains.pop(), []).append(index)
    for domain, indices in incomplete.items():
        _complete(partial, domain, indices)


def _complete(partial: PartialPlacement, domain: Domain, incomplete: Iterable[int]) -> None:
    """Fill the incomplete blocks of one node from its free workers, fewest gaps first."""
    gaps = {index: partial.blocks[index].count(None) for index in incomplete}
    completed = sorted(incomplete, key=lambda index: (gaps[index], index))
    num_gaps = sum(gaps.values())
    free = partial.free.setdefault(domain, [])
    while num_gaps > len(free):
        dissolved = completed.pop()
        num_gaps -= gaps[dissolved]
        _dissolve(partial, dissolved)
    free.sort(reverse=True)
    for index in completed:
        partial.blocks[index] = [worker or free.pop() for worker in partial.blocks[index]]


def _dissolve(partial: PartialPlacement, index: int) -> None:
    for worker in partial.blocks.pop(index):
        if worker is not None:
            partial.free.setdefault(partial.domains[worker], []).append(worker)


# 3. Whole blocks of free workers fill gaps and new replicas.


def _cut_free_blocks(partial: PartialPlacement) -> FreeBlocks:
    """The whole blocks that the free workers of each node form."""
    tp = partial.layout.tp
    free_blocks: FreeBlocks = {}
    for domain, workers in sorted(partial.free.items()):
        free: RankBlock = [*sorted(workers)]
        cuts = range(0, len(free) - tp + 1, tp)
        if cuts:
            free_blocks[domain] = [free[first : first + tp] for first in cuts]
    return free_blocks


def _fill_gaps(partial: PartialPlacement, free_blocks: FreeBlocks) -> None:
    """Complete the replicas of which some blocks have survived."""
    missing = partial.missing()
    if not missing or not partial.blocks:
        return
    copies: Counter[tuple[int, Domain | str]] = Counter()
    neighbours: set[tuple[int, Domain]] = set()
    started = set()

    def note(index: int) -> None:
        dp, shard = partial.split(index)
        domain = partial.domain_of(partial.blocks[index])
        copies[shard, domain] += 1
        copies[shard, domain[0]] += 1
        neighbours.add((dp, domain))
        started.add(dp)

    for index in partial.blocks:
        note(index)
    for index in missing:
        dp, shard = partial.split(index)
        if dp in started and free_blocks:
            domain = min(
                islice(free_blocks, NUM_COMPARED_NODES),
                key=lambda d: (copies[shard, d], copies[shard, d[0]], (dp, d) not in neighbours),
            )
            partial.blocks[index] = _take(free_blocks, domain)
            note(index)


def _take(free_blocks: FreeBlocks, domain: Domain) -> RankBlock:
    block = free_blocks[domain].pop(0)
    if not free_blocks[domain]:
        del free_blocks[domain]
    return block


def _fill_new_replicas(partial: PartialPlacement, free_blocks: FreeBlocks) -> None:
    """Fill the replicas of which no block has survived, each from as few domains as possible."""
    new: dict[int, list[int]] = {}
    for index in partial.missing():
        new.setdefault(partial.split(index)[0], []).append(index)
    size = partial.layout.pp * partial.layout.fsdp * partial.layout.cp
    queue = _deal_over_domains(partial, free_blocks, size)[: len(new) * size]
    replicas = [queue[first : first + size] for first in range(0, len(queue), size)]
    replicas.sort(key=lambda blocks: (-len(blocks), partial.domains[blocks[0][0] or ""], blocks))
    for indices, blocks in zip(new.values(), replicas, strict=False):
        partial.blocks.update(zip(indices, blocks, strict=False))


def _deal_over_domains(
    partial: PartialPlacement, free_blocks: FreeBlocks, size: int
) -> list[RankBlock]:
    """All free blocks, in the order in which new replicas of `size` blocks take them.

    Each rack gives its blocks round robin over its nodes, up to `size` at a time from each. The
    racks take turns likewise, but a node that holds fewer replicas goes first in any rack.
    """
    num_replicas = Counter(_domains_by_replica(partial)) if free_blocks else Counter()
    racks: dict[str, list[tuple[int, RankBlock]]] = {}
    for domain, node_blocks in free_blocks.items():
        racks.setdefault(domain[0], []).extend(
            (num_replicas[domain] + number // size, block)
            for number, block in enumerate(node_blocks)
        )
    parts = []
    for order, (rack, blocks) in enumerate(racks.items()):
        blocks.sort(key=lambda pair: pair[0])
        for turn, first in enumerate(range(0, len(blocks), size), num_replicas[rack]):
            most_replicas = max(number for number, _ in blocks[first : first + size])
            part = [block for _, block in blocks[first : first + size]]
            parts.append((most_replicas, turn, order, part))
    return [block for *_, part in sorted(parts) for block in part]


def _domains_by_replica(partial: PartialPlacement) -> Iterable[Domain | str]:
    """Each node and each rack, once for each replica of which it holds a block."""
    pairs: dict[tuple[int, Domain | str], None] = {}
    for index, block in partial.blocks.items():
        dp, domain = partial.split(index)[0], partial.domain_of(block)
        pairs[dp, domain] = pairs[dp, domain[0]] = None
    return (domain for _, domain in pairs)


# 4. The remaining workers fill the remaining ranks, across nodes.


def _fill_remaining_ranks(partial: PartialPlacement, survivors: dict[int, RankBlock]) -> None:
    """Fill the ranks for which no node had a whole block left."""
    missing = partial.missing()
    if not missing:
        return
    placed = set(chain.from_iterable(partial.blocks.values()))
    free = dict.fromkeys(worker for worker in partial.domains if worker not in placed)
    for index in missing:
        old = survivors.get(index) or [None] * partial.layout.tp
        partial.blocks[index] = [worker if worker in free else None for worker in old]
        for worker in partial.blocks[index]:
            free.pop(worker or "", None)
    others = iter(sorted(free, key=lambda worker: (partial.domains[worker], worker)))
    for index in missing:
        partial.blocks[index] = [worker or next(others) for worker in partial.blocks[index]]
