"""Parity: of parts in k + 1 failure domains any one can be made again from all the others.

RAID-5 (Patterson, Gibson and Katz, SIGMOD 1988) over the memory of keepers, as in SCR (Moody et
al., SC 2010). Each part is cut into k chunks, short ones thought filled up with zeros. The keeper
of a member has, besides that member's part, the XOR of one chunk of each other member: so a
member's chunks lie in the parities of all the others, each in one, and never beside its part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from elastic.geometry.errors import InvalidRedundancy

ALIGNED_BYTES = 64
MIN_MEMBERS = 3
"""In a set of two either's parity would be a copy of the other."""
_DIGIT_BITS = 17
_NUM_DIGITS = 3


def num_chunks_of(redundancy: str) -> int:
    """The k of `xor:k`; 0 for `copy`. Raises `InvalidRedundancy`."""
    found = re.fullmatch(r"copy|xor:([1-9][0-9]{0,3})", redundancy)
    if found is None:
        raise InvalidRedundancy(
            f"snapshot_redundancy={redundancy!r}: write copy, or xor:3 for the parity of 3 others"
        )
    return int(found[1] or 0)


def make_sets(
    by_domain: Mapping[str, Sequence[str]], num_chunks: int
) -> tuple[tuple[str, ...], ...]:
    """Sets of up to `num_chunks` + 1 members of different domains, from the fullest domains first.

    Who is left over once fewer than three domains have anybody left is in no set.
    """
    piles = [(-len(members), domain) for domain, members in by_domain.items() if members]
    heapify(piles)
    sets: list[tuple[str, ...]] = []
    while num_chunks + 1 >= MIN_MEMBERS and len(piles) >= MIN_MEMBERS:
        taken = [heappop(piles) for _ in range(min(num_chunks + 1, len(piles)))]
        sets.append(tuple(by_domain[domain][left] for left, domain in taken))
        for left, domain in taken:
            if left + 1:
                heappush(piles, (left + 1, domain))
    return tuple(sets)


def chunk_size(sizes: Sequence[int]) -> int:
    """How long a chunk, and so each parity, of parts of these sizes is."""
    num_chunks = len(sizes) - 1
    return -(-max(sizes) // (num_chunks * ALIGNED_BYTES)) * ALIGNED_BYTES


def chunk_within(sizes: Sequence[int], member: int, snapshot_server: int) -> range:
    """Where in a member's part the chunk lies that is in the parity of another one's keeper."""
    size, index = chunk_size(sizes), (snapshot_server - member - 1) % len(sizes)
    return range(min(index * size, sizes[member]), min((index + 1) * size, sizes[member]))


class ParityRead(NamedTuple):
    """Bytes of a member's part, or of its keeper's parity, and where their XOR is to go."""

    member: int
    is_parity: bool
    begin: int
    num_bytes: int
    into: int


def reads_for(sizes: Sequence[int], lost: int) -> Iterator[ParityRead]:
    """What has to be XORed into zeros to make the lost member's part again."""
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


def ballot_of(num_changes: int) -> float:
    """What a rank whose snapshot is whole adds to a vote; `num_changes` is of its order.

    Whose set-mates follow another order has no parity with them. So each order in turn counts in
    another of three digits, which fit a float64 exactly. (Who is three changes behind passes for
    up to date; each takes the death or the start of a keeper, so that is seconds.)
    """
    return float(1 << num_changes % _NUM_DIGITS * _DIGIT_BITS)


def num_whole(total: int) -> int:
    """How many ranks have their snapshots whole under one and the same order."""
    shifts = range(0, _NUM_DIGITS * _DIGIT_BITS, _DIGIT_BITS)
    return max(total >> shift & (1 << _DIGIT_BITS) - 1 for shift in shifts)
