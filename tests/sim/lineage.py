"""What simulated tensors hold: numbers that tell who they are and every step applied to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from elastic.geometry.assignment import Assignment
from elastic.geometry.regions import Region
from elastic.geometry.shard_map import region_of
from elastic.geometry.tensor_specs import TensorSpec

SPECS = (
    TensorSpec("first", (5, 3), layer=0, fsdp_dim=0, tp_dim=1, layer_costs=(1, 1)),
    TensorSpec("second", (31,), layer=1, fsdp_dim=0, tp_dim=0, layer_costs=(1, 1)),
    TensorSpec("moment", (5,), layer=1, fsdp_dim=0, layer_costs=(1, 1), kind="optimizer"),
    TensorSpec("scale", (2,), kind="buffer"),
)
"""Of the longest, each of up to six shards has some: who lacks a shard lacks a part of it."""

MODULUS = (1 << 61) - 1
FACTOR = 31


def token_of(step: int, generation: int) -> int:
    """The bits of a step differ with the generation that computes it."""
    return 1_000_003 * step + generation


@dataclass(frozen=True, slots=True)
class Lineage:
    """The steps that were applied, each as the generation that did it, in order."""

    generations: tuple[int, ...] = ()
    factor: int = 1
    offset: int = 0

    @property
    def step(self) -> int:
        return len(self.generations)

    def then(self, generation: int, skipped: bool = False) -> Lineage:
        """One more step; a skipped one changes nothing."""
        if skipped:
            return replace(self, generations=(*self.generations, generation))
        token = token_of(self.step + 1, generation)
        return Lineage(
            (*self.generations, generation),
            self.factor * FACTOR % MODULUS,
            (self.offset * FACTOR + token) % MODULUS,
        )

    def values(self, tensor: int, region: Region) -> list[int]:
        """What a region must hold after these steps."""
        initial = initial_values(tensor, region)
        return [(value * self.factor + self.offset) % MODULUS for value in initial]


@dataclass(slots=True)
class Part:
    """One worker's part of the state; `pieces` are the values of its regions, row by row."""

    assignment: Assignment
    lineage: Lineage
    regions: dict[int, Region]
    pieces: dict[int, list[int]]

    def apply(self, step: int, generation: int, skipped: bool = False) -> Iterator[None]:
        """The optimizer's step, in place: older parts that share a piece see it too.

        It pauses half-way, where it may break.
        """
        if skipped:
            self.lineage = self.lineage.then(generation, skipped)
            return
        token = token_of(step, generation)
        for tensor in sorted(self.pieces):
            piece = self.pieces[tensor]
            piece[:] = [(value * FACTOR + token) % MODULUS for value in piece]
            if tensor == min(self.pieces):
                yield
        self.lineage = self.lineage.then(generation)

    def is_whole(self) -> bool:
        """Whether each element is itself, with each step of the lineage applied once."""
        return all(
            piece == self.lineage.values(tensor, self.regions[tensor])
            for tensor, piece in self.pieces.items()
        )


def regions_under(assignment: Assignment, worker: str) -> dict[int, Region]:
    """What a worker shall hold, by tensor."""
    if worker not in assignment.members:
        return {}
    place = assignment.coordinates(worker)
    found = ((i, region_of(spec, assignment.layout, place)) for i, spec in enumerate(SPECS))
    return {i: region for i, region in found if region is not None}


@lru_cache(maxsize=4096)
def initial_values(tensor: int, region: Region) -> tuple[int, ...]:
    """Step 0: each element's own number."""
    whole = Region.whole(SPECS[tensor].shape)
    return tuple(1000 * (tensor + 1) + i for i in places(whole, region))


@lru_cache(maxsize=4096)
def places(whole: Region, part: Region) -> tuple[int, ...]:
    """Where the elements of `part` stand in the row of `whole`."""
    found = []
    begins = [p - w for p, w in zip(part.offsets, whole.offsets, strict=True)]
    for index in product(*map(range, part.shape)):
        place = 0
        for begin, i, size in zip(begins, index, whole.shape, strict=True):
            place = place * size + begin + i
        found.append(place)
    return tuple(found)


def cut(piece: Sequence[int], whole: Region, part: Region) -> list[int]:
    """The values of `part` out of the piece that holds `whole`."""
    return [piece[place] for place in places(whole, part)]
