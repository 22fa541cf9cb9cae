"""Parity: of k + 1 parts in different failure domains, any one can be rebuilt from the others.

RAID-5 (Patterson, Gibson and Katz, SIGMOD 1988) over the memory of snapshot servers, as in SCR
(Moody et al., SC 2010). Each part is cut into k chunks; short chunks count as padded with zeros.
A member's snapshot server holds that member's part and the XOR of one chunk of each other member.
So each chunk of a member lies in the parity of exactly one other member, never beside its part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from elastic.geometry.errors import InvalidRedundancy

ALIGNED_BYTES = 64
MIN_MEMBERS = 3
"""In a set of two members, the parity at one would be a copy of the other."""


def num_chunks_of(redundancy: str) -> int:
    """The k of `xor:k`; 0 for `copy`. Raises `InvalidRedundancy`."""
    match = re.fullmatch(r"copy|xor:([1-9][0-9]{0,3})", redundancy)
    if match is None:
        raise InvalidRedundancy(
            f"snapshot.redundancy={redundancy!r}: write copy, or xor:3 for the parity of 3 others"
        )
    return int(match[1] or 0)


def make_sets(
    by_domain: Mapping[str, Sequence[str]], num_chunks: int
) -> tuple[tuple[str, ...], ...]:
    """Sets of up to `num_chunks` + 1 members of different domains, from the fullest domains first.

    Once fewer than three domains have members left, the remaining members are in no set.
    """
    # By domain, the index from the end of its next member: -3 if it has three left.
    heap = [(-len(members), domain) for domain, members in by_domain.items() if members]
    heapify(heap)
    sets: list[tuple[str, ...]] = []
    while num_chunks + 1 >= MIN_MEMBERS and len(heap) >= MIN_MEMBERS:
        fullest = [heappop(heap) for _ in range(min(num_chunks + 1, len(heap)))]
        sets.append(tuple(by_domain[domain][index] for index, domain in fullest))
        for index, domain in fullest:
            if index + 1:
                heappush(heap, (index + 1, domain))
    return tuple(sets)


def chunk_size(sizes: Sequence[int]) -> int:
    """The bytes of a chunk, and so of each parity, for parts of these sizes."""
    num_chunks = len(sizes) - 1
    return -(-max(sizes) // (num_chunks * ALIGNED_BYTES)) * ALIGNED_BYTES


def chunk_within(sizes: Sequence[int], member: int, snapshot_server: int) -> range:
    """The bytes of a member's part that are in the parity at another member's snapshot server."""
    size, index = chunk_size(sizes), (snapshot_server - member - 1) % len(sizes)
    return range(min(index * size, sizes[member]), min((index + 1) * size, sizes[member]))


class ParityRead(NamedTuple):
    """Bytes to read from a member's part or parity, and the offset `into` which they are XORed."""

    member: int
    is_parity: bool
    begin: int
    num_bytes: int
    into: int


def reads_for(sizes: Sequence[int], lost: int) -> Iterator[ParityRead]:
    """The reads whose XOR into a buffer of zeros rebuilds the part of the lost member."""
    others = [member for member in range(len(sizes)) if member != lost]
    for snapshot_server in others:
        wanted = chunk_within(sizes, lost, snapshot_server)
        if not wanted:
            continue
        yield ParityRead(snapshot_server, True, 0, len(wanted), wanted.start)
        for member in others:
            chunk = chunk_within(sizes, member, snapshot_server)[: len(wanted)]
            if member != snapshot_server and chunk:
                yield ParityRead(member, False, chunk.start, len(chunk), wanted.start)
