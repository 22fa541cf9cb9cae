"""Simulated parities: XORs of the real values, so that a rebuilt part can be checked.

A value counts as many bytes as chunks are aligned to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from sim.lineage import Part, regions_under

from elastic.geometry.assignment import Assignment
from elastic.reshard.parity import ALIGNED_BYTES, chunk_size, chunk_within, reads_for

NUM_VERSIONS = 2


@dataclass
class SimParity:
    """Like `actors.snapshots.parity.ParityBuffer`: two versions; half a chunk spoils its step."""

    others: frozenset[str]
    whole: dict[int, list[int]] = field(default_factory=dict)
    step: int = -1
    begun: set[str] = field(default_factory=set)
    folded: dict[str, list[int]] = field(default_factory=dict)

    def begin(self, worker: str, step: int, kept_step: int) -> bool:
        """Whether its chunk is accepted, or has been."""
        if step > self.step:
            self.step, self.begun, self.folded = step, set(), {}
            if len(self.whole) == NUM_VERSIONS:
                del self.whole[min(self.whole.keys() - {kept_step})]
        is_able = step == self.step and (worker not in self.begun or worker in self.folded)
        self.begun.add(worker)
        return is_able

    def end(self, worker: str, step: int, chunk: list[int]) -> bool:
        """Whether it was in time to be used."""
        if step == self.step:
            self.folded[worker] = chunk
            if self.folded.keys() == self.others:
                self.whole[step] = xored(self.folded.values())
        return step == self.step


def sizes_of(assignment: Assignment, members: Sequence[str]) -> list[int]:
    regions = [regions_under(assignment, member).values() for member in members]
    return [ALIGNED_BYTES * sum(r.num_elements for r in some) for some in regions]


def chunk_of(part: Part, members: Sequence[str], worker: str, at: str) -> list[int]:
    """The values of a worker's part that go into the parity at another member's snapshot server."""
    sizes = sizes_of(part.assignment, members)
    chunk = chunk_within(sizes, members.index(worker), members.index(at))
    return flat(part)[chunk.start // ALIGNED_BYTES : chunk.stop // ALIGNED_BYTES]


def made_again(
    missing: str,
    parts: Mapping[str, Part],
    parities: Mapping[str, list[int]],
    members: Sequence[str],
    old: Assignment,
) -> Part:
    """Rebuild a part from the parts of the others of its set and the parities at their servers."""
    sizes = sizes_of(old, members)
    values = [0] * (sizes[members.index(missing)] // ALIGNED_BYTES)
    for read in reads_for(sizes, members.index(missing)):
        holder = members[read.member]
        source = parities[holder] if read.is_parity else flat(parts[holder])
        source += [0] * (chunk_size(sizes) // ALIGNED_BYTES - len(source)) if read.is_parity else []
        begin, num_values = read.begin // ALIGNED_BYTES, read.num_bytes // ALIGNED_BYTES
        for place, value in enumerate(source[begin : begin + num_values]):
            values[read.into // ALIGNED_BYTES + place] ^= value
    [lineage] = {part.lineage for part in parts.values()}
    regions = regions_under(old, missing)
    pieces: dict[int, list[int]] = {}
    for tensor in sorted(regions):
        num_values = regions[tensor].num_elements
        pieces[tensor], values = values[:num_values], values[num_values:]
    return Part(old, lineage, regions, pieces)


def flat(part: Part) -> list[int]:
    return [value for tensor in sorted(part.pieces) for value in part.pieces[tensor]]


def xored(chunks: Iterable[list[int]]) -> list[int]:
    """The XOR of the chunks; short ones are padded with zeros."""
    total: list[int] = []
    for chunk in chunks:
        total = [a ^ b for a, b in zip_longest(total, chunk, fillvalue=0)]
    return total
