"""Simulated tensors: their values identify each element and every step applied to it."""

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
"""The longest is divided among all of up to six shards: without a shard, a part of it is
missing."""

MODULUS = (1 << 61) - 1
FACTOR = 31


def token_of(step: int, generation: int) -> int:
    """The bits of a step differ with the generation that computes it."""
    return 1_000_003 * step + generation


@dataclass(frozen=True, slots=True)
class Lineage:
    """The applied steps in order, each as the generation that computed it."""

    generations: tuple[int, ...] = ()
    factor: int = 1
    offset: int = 0

    @property
    def step(self) -> int:
        return len(self.generations)

    def then(self, generation: int, skipped: bool = False) -> Lineage:
        """The lineage with one more step; a skipped step changes no values."""
        if skipped:
            return replace(self, generations=(*self.generations, generation))
        token = token_of(self.step + 1, generation)
        return Lineage(
            (*self.generations, generation),
            self.factor * FACTOR % MODULUS,
            (self.offset * FACTOR + token) % MODULUS,
        )

    def values(self, tensor: int, region: Region) -> list[int]:
        """The values that a region must hold after these steps."""
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
        """The optimizer's step, in place: older parts that share a piece change too.

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
    """The regions that a worker holds under an assignment, by tensor."""
    if worker not in assignment.members:
        return {}
    coordinates = assignment.coordinates(worker)
    regions = ((i, region_of(spec, assignment.layout, coordinates)) for i, spec in enumerate(SPECS))
    return {i: region for i, region in regions if region is not None}


@lru_cache(maxsize=4096)
def initial_values(tensor: int, region: Region) -> tuple[int, ...]:
    """The values of step 0: each element's own number."""
    whole = Region.whole(SPECS[tensor].shape)
    return tuple(1000 * (tensor + 1) + i for i in places(whole, region))


@lru_cache(maxsize=4096)
def places(whole: Region, part: Region) -> tuple[int, ...]:
    """The positions of the elements of `part` in the flattened `whole`."""
    positions = []
    begins = [p - w for p, w in zip(part.offsets, whole.offsets, strict=True)]
    for index in product(*map(range, part.shape)):
        position = 0
        for begin, i, size in zip(begins, index, whole.shape, strict=True):
            position = position * size + begin + i
        positions.append(position)
    return tuple(positions)


def cut(piece: Sequence[int], whole: Region, part: Region) -> list[int]:
    """The values of `part` from the piece that holds `whole`."""
    return [piece[place] for place in places(whole, part)]
