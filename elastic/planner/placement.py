"""Who sits where: world ranks for a layout, so that little moves and neighbours lie close.

Ranks are dealt in blocks of `tp` consecutive ones, since a tp group must not cross a node
while any assignment avoids it. In this order:

1. Survivors stay at their coordinates if the model axes are the same (see `staying`).
2. A block that stayed but cannot be completed on one node is given up. A node of n workers
   still yields n // tp whole blocks, so this loses no block.
3. Gaps in replicas and then new replicas are filled with whole blocks, spread over failure
   domains (see `spreading`).
4. What is left for want of whole blocks goes to the ranks where it had stayed, then by (rack,
   node, name).
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


class _Homeless(NamedTuple):
    """A block of survivors whose own place is taken or gone."""

    fsdp: int
    num_gaps: int
    workers: RankBlock


def stay(
    layout: Layout, previous: Assignment | None, members: Collection[str]
) -> dict[int, RankBlock]:
    """The blocks of the new mesh, by index, that survivors take over, with their gaps."""
    if previous is None or _model_axes(previous.layout) != _model_axes(layout):
        return {}
    blocks: dict[int, RankBlock] = {}
    homeless: dict[tuple[int, int], list[_Homeless]] = {}
    for (pp, dp, fsdp, cp), workers in _survivors(previous, members):
        target = (2 * fsdp + 1) * layout.fsdp // (2 * previous.layout.fsdp)
        index = ((pp * layout.dp + dp) * layout.fsdp + target) * layout.cp + cp
        if dp < layout.dp and index not in blocks:
            blocks[index] = workers
        else:
            moved = _Homeless(fsdp, workers.count(None), workers)
            homeless.setdefault((pp, cp), []).append(moved)
    for (pp, cp), moving in homeless.items():
        _house(layout, previous.layout.fsdp, pp, cp, sorted(moving, key=_order), blocks)
    return blocks


def _model_axes(layout: Layout) -> tuple[int, int, int]:
    return layout.pp, layout.cp, layout.tp


def _order(moved: _Homeless) -> tuple[int, int]:
    return moved.fsdp, moved.num_gaps


def _survivors(
    previous: Assignment, members: Collection[str]
) -> list[tuple[tuple[int, ...], RankBlock]]:
    """The old blocks that have any survivor, with (pp, dp, fsdp, cp)."""
    *degrees, tp = previous.layout.degrees
    kept: RankBlock = [worker if worker in members else None for worker in previous.members]
    old = zip(product(*map(range, degrees)), range(0, len(kept), tp), strict=True)
    return [
        (coordinates, block) for coordinates, first in old if any(block := kept[first : first + tp])
    ]


def _house(
    layout: Layout,
    old_fsdp: int,
    pp: int,
    cp: int,
    moving: Sequence[_Homeless],
    blocks: dict[int, RankBlock],
) -> None:
    """Sweep homeless blocks and free ones, both in order of `fsdp`, for shards that overlap."""
    free = (
        (fsdp, index)
        for fsdp, dp in product(range(layout.fsdp), range(layout.dp))
        if (index := ((pp * layout.dp + dp) * layout.fsdp + fsdp) * layout.cp + cp) not in blocks
    )
    fsdp, index = next(free, (layout.fsdp, -1))
    for moved in moving:
        first = moved.fsdp * layout.fsdp // old_fsdp
        last = ((moved.fsdp + 1) * layout.fsdp - 1) // old_fsdp
        while fsdp < first:
            fsdp, index = next(free, (layout.fsdp, -1))
        if fsdp <= last:
            blocks[index] = moved.workers
            fsdp, index = next(free, (layout.fsdp, -1))


Bundles = dict[Domain, list[RankBlock]]
"""Whole blocks of free workers, by the node on which they lie, in sorted order."""


@dataclass(slots=True)
class PartialPlacement:
    """The mesh as it fills up: blocks by index, and who is still free on each node.

    What a block holds, its shard, is named by the block of replica 0 that holds the same.
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
        """Where a block lies, or the first of its workers if it crosses nodes."""
        return self.domains[next(worker for worker in block if worker)]

    def missing(self) -> list[int]:
        """The blocks that nobody fills yet."""
        num_blocks = self.layout.num_workers // self.layout.tp
        if len(self.blocks) == num_blocks:
            return []
        return [index for index in range(num_blocks) if index not in self.blocks]


PREFETCH = 16
"""So many nodes are compared for each gap: enough for any usual loss, and never quadratic."""


def fill_gaps(partial: PartialPlacement, bundles: Bundles) -> None:
    """Complete the replicas of which some blocks stayed."""
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
        if dp in started and bundles:
            domain = min(
                islice(bundles, PREFETCH),
                key=lambda d: (copies[shard, d], copies[shard, d[0]], (dp, d) not in neighbours),
            )
            partial.blocks[index] = _take(bundles, domain)
            note(index)


def _take(bundles: Bundles, domain: Domain) -> RankBlock:
    block = bundles[domain].pop(0)
    if not bundles[domain]:
        del bundles[domain]
    return block


def fill_new_replicas(partial: PartialPlacement, bundles: Bundles) -> None:
    """Fill the replicas of which no block stayed, each from as few domains as may be."""
    new: dict[int, list[int]] = {}
    for index in partial.missing():
        new.setdefault(partial.split(index)[0], []).append(index)
    size = partial.layout.pp * partial.layout.fsdp * partial.layout.cp
    queue = _deal_over_domains(partial, bundles, size)[: len(new) * size]
    replicas = [queue[first : first + size] for first in range(0, len(queue), size)]
    replicas.sort(key=lambda blocks: (-len(blocks), partial.domains[blocks[0][0] or ""], blocks))
    for indices, blocks in zip(new.values(), replicas, strict=False):
        partial.blocks.update(zip(indices, blocks, strict=False))


def _deal_over_domains(partial: PartialPlacement, bundles: Bundles, size: int) -> list[RankBlock]:
    """All bundles in the order in which new replicas of so many blocks take them."""
    homes = Counter(_homes(partial)) if bundles else Counter()
    racks: dict[str, list[tuple[int, list[RankBlock]]]] = {}
    for domain, of_node in bundles.items():
        racks.setdefault(domain[0], []).append((homes[domain], of_node))
    return _deal([(homes[rack], _deal(nodes, size)) for rack, nodes in racks.items()], size)


def _homes(partial: PartialPlacement) -> Iterable[Domain | str]:
    """Each node and each rack, once for each replica of which it holds a block."""
    pairs: dict[tuple[int, Domain | str], None] = {}
    for index, block in partial.blocks.items():
        dp, domain = partial.split(index)[0], partial.domain_of(block)
        pairs[dp, domain] = pairs[dp, domain[0]] = None
    return (domain for _, domain in pairs)


def _deal(heaps: Iterable[tuple[int, list[RankBlock]]], size: int) -> list[RankBlock]:
    """All blocks in one row: round robin over the heaps, up to `size` at a time from each.

    A heap is left out for as many rounds as its number says: it has had its turns.
    """
    parts = [
        (num_turns + first // size, order, blocks[first : first + size])
        for order, (num_turns, blocks) in enumerate(heaps)
        for first in range(0, len(blocks), size)
    ]
    return [block for _, _, part in sorted(parts) for block in part]


def place_workers(
    layout: Layout, previous: Assignment | None, members: Sequence[str], topology: Topology
) -> tuple[str, ...]:
    """World ranks 0, 1, ... for as many of the members as the layout has ranks.

    `members` are sorted, without doubles, and at least `layout.num_workers`.
    """
    stayed = stay(layout, previous, set(members))
    nowhere = Place()
    domains = {worker: topology.get(worker, nowhere)[::-1] for worker in members}
    placed = set(chain.from_iterable(stayed.values()))
    partial = PartialPlacement(layout, domains, dict(stayed), {})
    for worker, domain in domains.items():
        if worker not in placed:
            partial.free.setdefault(domain, []).append(worker)
    _give_up_torn_blocks(partial)
    bundles = _cut_bundles(partial)
    fill_gaps(partial, bundles)
    fill_new_replicas(partial, bundles)
    _fill_the_rest(partial, stayed)
    num_blocks = layout.num_workers // layout.tp
    ranks = chain.from_iterable(partial.blocks[index] for index in range(num_blocks))
    return tuple(worker for worker in ranks if worker is not None)


def _give_up_torn_blocks(partial: PartialPlacement) -> None:
    """Complete on its node each block that stayed, or set its workers free."""
    if partial.layout.tp == 1:
        return
    torn: dict[Domain, list[int]] = {}
    for index, block in sorted(partial.blocks.items()):
        domains = {partial.domains[worker] for worker in block if worker}
        if len(domains) > 1:
            _set_free(partial, index)
        elif None in block:
            torn.setdefault(domains.pop(), []).append(index)
    for domain, indices in torn.items():
        _complete(partial, domain, indices)


def _complete(partial: PartialPlacement, domain: Domain, torn: Iterable[int]) -> None:
    """Fill the torn blocks of one node from its free workers, those with fewest gaps first."""
    gaps = {index: partial.blocks[index].count(None) for index in torn}
    left = sorted(torn, key=lambda index: (gaps[index], index))
    num_gaps = sum(gaps.values())
    free = partial.free.setdefault(domain, [])
    while num_gaps > len(free):
        given_up = left.pop()
        num_gaps -= gaps[given_up]
        _set_free(partial, given_up)
    free.sort(reverse=True)
    for index in left:
        partial.blocks[index] = [worker or free.pop() for worker in partial.blocks[index]]


def _set_free(partial: PartialPlacement, index: int) -> None:
    for worker in partial.blocks.pop(index):
        if worker is not None:
            partial.free.setdefault(partial.domains[worker], []).append(worker)


def _cut_bundles(partial: PartialPlacement) -> Bundles:
    """The whole blocks that each node can still give."""
    tp = partial.layout.tp
    bundles: Bundles = {}
    for domain, workers in sorted(partial.free.items()):
        free: RankBlock = [*sorted(workers)]
        cuts = range(0, len(free) - tp + 1, tp)
        if cuts:
            bundles[domain] = [free[first : first + tp] for first in cuts]
    return bundles


def _fill_the_rest(partial: PartialPlacement, stayed: dict[int, RankBlock]) -> None:
    """Ranks for which no node had a whole block left."""
    missing = partial.missing()
    if not missing:
        return
    placed = set(chain.from_iterable(partial.blocks.values()))
    left = dict.fromkeys(w for w in partial.domains if w not in placed)
    for index in missing:
        old = stayed.get(index) or [None] * partial.layout.tp
        partial.blocks[index] = [worker if worker in left else None for worker in old]
        for worker in partial.blocks[index]:
            left.pop(worker or "", None)
    rest = iter(sorted(left, key=lambda worker: (partial.domains[worker], worker)))
    for index in missing:
        partial.blocks[index] = [worker or next(rest) for worker in partial.blocks[index]]
