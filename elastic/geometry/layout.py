"""Layout: the degrees of parallelism and the mesh of world ranks that they span."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import NamedTuple

from elastic.geometry.errors import InvalidLayout
from elastic.geometry.zero import HYBRID, STAGES, parse_stage

AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""Mesh axes from outermost to innermost: inner axes communicate more often."""

MAX_DIGITS = 9
"""Longest degree that is read: Python parses very long numbers in quadratic time."""


class Coordinates(NamedTuple):
    """The position of a worker in the mesh: one index for each axis, in the order of `AXES`."""

    pp: int = 0
    dp: int = 0
    fsdp: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The degrees of parallelism of one assignment.

    `dp` counts replicas, `fsdp` shards (`dp x fsdp` is HSDP). `ep` folds out of
    `fsdp x cp x tp` for expert tensors. `zero` says what `fsdp` shards
    (Rajbhandari et al., ZeRO, 2020): 0 nothing, 1 optimizer state, 2 also gradients,
    3 also parameters. `vp` is the number of pipeline stages on each pipeline rank.

    Raises `InvalidLayout` if a degree is not a positive integer or `ep` does not fold.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 3
    vp: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep", "vp"):
            if getattr(self, axis) < 1:
                raise InvalidLayout(f"{axis}={getattr(self, axis)}: a degree must be at least 1")
        if self.zero not in STAGES:
            raise InvalidLayout(f"zero={self.zero}: the ZeRO stage must be 0, 1, 2 or 3")
        if (self.fsdp * self.cp * self.tp) % self.ep:
            raise InvalidLayout(
                f"ep={self.ep} does not divide fsdp x cp x tp = {self.fsdp * self.cp * self.tp}"
            )

        if self.vp > 1 and self.pp == 1:
            raise InvalidLayout(
                f"vp={self.vp}: several stages on a rank need a pipeline; set pp to 2 or more"
            )

    @property
    def degrees(self) -> tuple[int, ...]:
        """The size of each mesh axis, in the order of `AXES`."""
        return (self.pp, self.dp, self.fsdp, self.cp, self.tp)

    @property
    def num_workers(self) -> int:
        return prod(self.degrees)

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks that read different samples of a batch."""
        return self.dp * self.fsdp

    def coordinates(self, world_rank: int) -> Coordinates:
        """The mesh coordinates of a world rank (invariant 1: the inverse of `world_rank`)."""
        if not 0 <= world_rank < self.num_workers:
            raise InvalidLayout(f"world rank {world_rank} is outside 0..{self.num_workers - 1}")
        indices = []
        for degree in reversed(self.degrees):
            world_rank, index = divmod(world_rank, degree)
            indices.append(index)
        return Coordinates(*reversed(indices))

    def world_rank(self, coordinates: Coordinates) -> int:
        rank = 0
        for degree, index in zip(self.degrees, coordinates, strict=True):
            rank = rank * degree + index
        return rank

    def data_rank(self, world_rank: int) -> int:
        """The index of a world rank among the ranks that read different samples."""
        coordinates = self.coordinates(world_rank)
        return coordinates.dp * self.fsdp + coordinates.fsdp

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The world ranks of each group along an axis; they partition all ranks (invariant 1)."""
        position = AXES.index(axis)
        stride = prod(self.degrees[position + 1 :])
        degree = self.degrees[position]
        firsts = (r for r in range(self.num_workers) if (r // stride) % degree == 0)
        return tuple(tuple(r + i * stride for i in range(degree)) for r in firsts)

    def __str__(self) -> str:
        parts = [f"{axis}={getattr(self, axis)}" for axis in (*AXES, "ep", "vp")]
        shown = [part for part in parts if not part.endswith("=1")]
        shown += [f"zero={self.zero}"] if self.zero != 3 else []
        return ",".join(shown) or "dp=1"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `dp=2,tp=2`; `zero` may be an FSDP strategy, as in `fsdp=4,zero=FULL_SHARD`.

        Raises `InvalidLayout` for an unknown axis, a bad degree or a bad strategy.
        """
        known = {field.name for field in fields(cls)}
        degrees: dict[str, int] = {}
        for part in text.replace(" ", "").split(","):
            axis, _, value = part.partition("=")
            if axis not in known:
                raise InvalidLayout(f"'{part}': not an axis; write e.g. dp=2,fsdp=2 (in {text!r})")
            if axis in degrees:
                raise InvalidLayout(f"'{axis}' occurs twice in {text!r}: remove one")
            if axis == "zero":
                degrees[axis] = parse_stage(value)
                continue
            if not (value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS):
                raise InvalidLayout(f"'{part}': the degree must be a whole number, e.g. {axis}=2")
            degrees[axis] = int(value)
        if HYBRID in text.upper() and degrees.get("dp", 1) == 1:
            raise InvalidLayout(
                f"zero={HYBRID} shards within replicas: set dp=2 or more, e.g. "
                f"dp=2,fsdp=2,zero={HYBRID}; without replicas use zero=FULL_SHARD (in {text!r})"
            )
        return cls(**degrees)
