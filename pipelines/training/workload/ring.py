"""A sequence on a ring of ranks: the positions of each rank, and the circulation of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from actors.distributed.backends.waiting import launching
from actors.distributed.stall import wait_for

CPU_TILE = 256
GPU_TILE = 1024
"""Maximum number of queries and of keys in one tile of scores, which bounds memory: on a CPU a tile
should fit the cache, on a GPU it should fill a kernel."""


def positions(length: int, cp_rank: int, num_cp_ranks: int) -> Tensor:
    """The positions of a sequence that a rank holds: int64, on the host, ascending."""
    early, late = chunks(length, cp_rank, num_cp_ranks)
    return torch.tensor([*early, *late], dtype=torch.int64)


def chunks(length: int, cp_rank: int, num_cp_ranks: int) -> tuple[range, range]:
    """The two ranges of positions that a rank holds; a short sequence leaves some empty.

    The sequence is cut into twice as many chunks as there are ranks. Rank i holds the i-th chunk
    from the front and the i-th from the back, which balances the causal pairs.
    """
    num_chunks = 2 * num_cp_ranks
    bounds = [length * index // num_chunks for index in range(num_chunks + 1)]
    early, late = cp_rank, num_chunks - 1 - cp_rank
    return range(bounds[early], bounds[early + 1]), range(bounds[late], bounds[late + 1])


class SequenceSegment(NamedTuple):
    """Consecutive positions that a rank holds, and their local indices."""

    positions: slice
    local: slice


class Tile(NamedTuple):
    """A block of local queries and keys for which scores are computed together.

    `masked` is None or boolean (batch or 1, queries, keys), True where a query may not attend.
    """

    queries: slice
    keys: slice
    masked: Tensor | None


class VisibleKeys(NamedTuple):
    """Some local queries, and the keys of one rank that they attend to.

    Each query attends to each of the keys, or if `is_causal` to those up to its own index: then
    both have the same length.
    """

    queries: slice
    keys: slice
    is_causal: bool


@dataclass(frozen=True)
class Ring:
    """A sequence of `length` on the ranks of a group; each rank sends blocks to the next.

    `documents`, on the device, is None or int64 (batch, length): the document of each token.
    """

    length: int
    group: ProcessGroup
    documents: Tensor | None = None

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def cp_rank(self) -> int:
        return self.group.rank()

    def num_held(self, cp_rank: int) -> int:
        return sum(map(len, chunks(self.length, cp_rank, self.size)))

    def circulate(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank's block with its source rank, this rank's first; all of one shape.

        The next block is in flight while the caller computes with the current one.
        """
        for step in range(self.size):
            hop = Hop(block, self) if step < self.size - 1 else None
            yield (self.cp_rank - step) % self.size, block
            if hop is not None:
                block = hop.wait()

    def visible_keys(self, source: int) -> VisibleKeys | None:
        """What this rank's queries attend to among the keys of rank `source`, without documents.

        An earlier rank's late chunk is later than all of this rank's queries, and a later rank's
        chunks lie between this rank's two. So one block describes each source. None if it is empty.
        """
        num_queries, num_keys = self.num_held(self.cp_rank), self.num_held(source)
        first_query = 0
        if source < self.cp_rank:
            num_keys = len(chunks(self.length, source, self.size)[0])
        elif source > self.cp_rank:
            first_query = len(chunks(self.length, self.cp_rank, self.size)[0])
        if first_query == num_queries or num_keys == 0:
            return None
        is_causal = source == self.cp_rank
        return VisibleKeys(slice(first_query, num_queries), slice(0, num_keys), is_causal)

    def tiles(self, source: int, device: torch.device) -> Iterator[Tile]:
        """Yield the tiles of this rank's queries with the keys of rank `source`.

        Tiles with all keys later than all queries are skipped; those with all keys earlier need no
        causal mask.
        """
        longest = CPU_TILE if device.type == "cpu" else GPU_TILE
        for queries in self._segments(self.cp_rank, longest):
            for keys in self._segments(source, longest):
                if keys.positions.start < queries.positions.stop:
                    masked = self._masked(queries.positions, keys.positions, device)
                    yield Tile(queries.local, keys.local, masked)

    def _segments(self, cp_rank: int, longest: int) -> list[SequenceSegment]:
        segments: list[SequenceSegment] = []
        num_before = 0
        for chunk in chunks(self.length, cp_rank, self.size):
            offset = num_before - chunk.start
            for first in chunk[::longest]:
                last = min(first + longest, chunk.stop)
                segments.append(
                    SequenceSegment(slice(first, last), slice(first + offset, last + offset))
                )
            num_before += len(chunk)
        return segments

    def _masked(self, queries: slice, keys: slice, device: torch.device) -> Tensor | None:
        masked = None
        if self.documents is not None:
            masked = self.documents[:, queries, None] != self.documents[:, None, keys]
        if keys.stop - 1 > queries.start:
            query_positions = torch.arange(queries.start, queries.stop, device=device)
            key_positions = torch.arange(keys.start, keys.stop, device=device)
            later = (key_positions > query_positions[:, None])[None]
            masked = later if masked is None else masked | later
        return masked


class Hop:
    """An asynchronous send of a block to the next rank, with the receive from the previous one.

    Several may be in flight at once if all ranks start them in the same order.
    """

    def __init__(self, block: Tensor, ring: Ring) -> None:
        self._arriving = torch.empty_like(block)
        following, previous = (ring.cp_rank + 1) % ring.size, (ring.cp_rank - 1) % ring.size
        operations = [
            dist.P2POp(dist.isend, block, group=ring.group, group_peer=following),
            dist.P2POp(dist.irecv, self._arriving, group=ring.group, group_peer=previous),
        ]
        self._works = launching(dist.batch_isend_irecv, operations)

    def wait(self) -> Tensor:
        for work in self._works:
            wait_for(work)
        return self._arriving
