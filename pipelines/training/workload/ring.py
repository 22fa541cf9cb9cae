"""A sequence on a ring of ranks: which positions each holds, and how blocks of them go around."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from actors.distributed.stall import wait_for

CPU_TILE = 256
GPU_TILE = 1024
"""Scores are computed for at most so many queries and keys at a time, which bounds their memory:
on a CPU they should stay in its cache, on a GPU a kernel should have enough to do."""


def positions(length: int, cp_rank: int, num_cp_ranks: int) -> Tensor:
    """Which positions of a sequence a rank holds: int64, on the host, ascending."""
    early, late = chunks(length, cp_rank, num_cp_ranks)
    return torch.tensor([*early, *late], dtype=torch.int64)


def chunks(length: int, cp_rank: int, num_cp_ranks: int) -> tuple[range, range]:
    """The two runs of positions that a rank holds; a short sequence leaves some empty.

    The sequence is cut into twice as many chunks as there are ranks, and a rank has the i-th from
    the front and the i-th from the back: so all have the same share of the causal pairs.
    """
    num_chunks = 2 * num_cp_ranks
    bounds = [length * index // num_chunks for index in range(num_chunks + 1)]
    early, late = cp_rank, num_chunks - 1 - cp_rank
    return range(bounds[early], bounds[early + 1]), range(bounds[late], bounds[late + 1])


class SequenceSegment(NamedTuple):
    """Consecutive positions that a rank holds, and the same as its local indices."""

    positions: slice
    local: slice


class Tile(NamedTuple):
    """Local queries and keys of a block between which scores are computed.

    `masked` is None or boolean (batch or 1, queries, keys), True where a query may not attend.
    """

    queries: slice
    keys: slice
    masked: Tensor | None


@dataclass(frozen=True)
class Ring:
    """A sequence of `length` on the ranks of a group, each of which passes blocks to the next.

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
        """Each rank's block with the rank it is from, one's own first; all of one shape.

        The next one travels while the caller computes with the present one.
        """
        for step in range(self.size):
            hop = Hop(block, self) if step < self.size - 1 else None
            yield (self.cp_rank - step) % self.size, block
            if hop is not None:
                block = hop.landed()

    def tiles(self, source: int, device: torch.device) -> Iterator[Tile]:
        """What there is to compute with the keys of a rank; what is later than all queries of a
        tile is left out, and what is earlier than all needs no causal mask."""
        longest = CPU_TILE if device.type == "cpu" else GPU_TILE
        for queries in self._segments(self.cp_rank, longest):
            for keys in self._segments(source, longest):
                if keys.positions.start < queries.positions.stop:
                    masked = self._masked(queries.positions, keys.positions, device)
                    yield Tile(queries.local, keys.local, masked)

    def _segments(self, cp_rank: int, longest: int) -> list[SequenceSegment]:
        found: list[SequenceSegment] = []
        num_before = 0
        for chunk in chunks(self.length, cp_rank, self.size):
            offset = num_before - chunk.start
            for first in chunk[::longest]:
                last = min(first + longest, chunk.stop)
                found.append(
                    SequenceSegment(slice(first, last), slice(first + offset, last + offset))
                )
            num_before += len(chunk)
        return found

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
    """A block on its way to the next rank, and that of the previous rank on its way here.

    Several may be under way at once, if all ranks begin them in the same order.
    """

    def __init__(self, block: Tensor, ring: Ring) -> None:
        self._arriving = torch.empty_like(block)
        following, previous = (ring.cp_rank + 1) % ring.size, (ring.cp_rank - 1) % ring.size
        operations = [
            dist.P2POp(dist.isend, block, group=ring.group, group_peer=following),
            dist.P2POp(dist.irecv, self._arriving, group=ring.group, group_peer=previous),
        ]
        self._works = dist.batch_isend_irecv(operations)

    def landed(self) -> Tensor:
        for work in self._works:
            wait_for(work)
        return self._arriving
