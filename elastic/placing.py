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

from collections.abc import Iterable, Sequence
from itertools import chain

from elastic.assignment import Assignment
from elastic.layout import Layout
from elastic.seating import Bundles, Domain, Place, Seating, Topology
from elastic.spreading import fill_gaps, fill_new_replicas
from elastic.staying import Block, stay


def seat(
    layout: Layout, previous: Assignment | None, members: Sequence[str], topology: Topology
) -> tuple[str, ...]:
    """World ranks 0, 1, ... for as many of the members as the layout has ranks.

    `members` are sorted, without doubles, and at least `layout.num_workers`.
    """
    stayed = stay(layout, previous, set(members))
    nowhere = Place()
    domains = {worker: topology.get(worker, nowhere)[::-1] for worker in members}
    seated = set(chain.from_iterable(stayed.values()))
    seating = Seating(layout, domains, dict(stayed), {})
    for worker, domain in domains.items():
        if worker not in seated:
            seating.free.setdefault(domain, []).append(worker)
    _give_up_torn_blocks(seating)
    bundles = _cut_bundles(seating)
    fill_gaps(seating, bundles)
    fill_new_replicas(seating, bundles)
    _fill_the_rest(seating, stayed)
    num_blocks = layout.num_workers // layout.tp
    ranks = chain.from_iterable(seating.blocks[index] for index in range(num_blocks))
    return tuple(worker for worker in ranks if worker is not None)


def _give_up_torn_blocks(seating: Seating) -> None:
    """Complete on its node each block that stayed, or set its workers free."""
    if seating.layout.tp == 1:
        return
    torn: dict[Domain, list[int]] = {}
    for index, block in sorted(seating.blocks.items()):
        domains = {seating.domains[worker] for worker in block if worker}
        if len(domains) > 1:
            _set_free(seating, index)
        elif None in block:
            torn.setdefault(domains.pop(), []).append(index)
    for domain, indices in torn.items():
        _complete(seating, domain, indices)


def _complete(seating: Seating, domain: Domain, torn: Iterable[int]) -> None:
    """Fill the torn blocks of one node from its free workers, those with fewest gaps first."""
    gaps = {index: seating.blocks[index].count(None) for index in torn}
    left = sorted(torn, key=lambda index: (gaps[index], index))
    num_gaps = sum(gaps.values())
    free = seating.free.setdefault(domain, [])
    while num_gaps > len(free):
        given_up = left.pop()
        num_gaps -= gaps[given_up]
        _set_free(seating, given_up)
    free.sort(reverse=True)
    for index in left:
        seating.blocks[index] = [worker or free.pop() for worker in seating.blocks[index]]


def _set_free(seating: Seating, index: int) -> None:
    for worker in seating.blocks.pop(index):
        if worker is not None:
            seating.free.setdefault(seating.domains[worker], []).append(worker)


def _cut_bundles(seating: Seating) -> Bundles:
    """The whole blocks that each node can still give."""
    tp = seating.layout.tp
    bundles: Bundles = {}
    for domain, workers in sorted(seating.free.items()):
        free: Block = [*sorted(workers)]
        cuts = range(0, len(free) - tp + 1, tp)
        if cuts:
            bundles[domain] = [free[first : first + tp] for first in cuts]
    return bundles


def _fill_the_rest(seating: Seating, stayed: dict[int, Block]) -> None:
    """Ranks for which no node had a whole block left."""
    missing = seating.missing()
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
