"""A layout: the degrees of parallelism, and the mesh of world ranks that they span."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import NamedTuple

from elastic.geometry.errors import InvalidLayout
from elastic.geometry.zero import HYBRID, STAGES, parse_stage

AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""Mesh axes from outermost to innermost: those further right talk more often."""

MAX_DIGITS = 9
"""Of a degree; Python takes quadratic time to read a number of very many."""


class Coordinates(NamedTuple):
    """Where a worker stands in the mesh: one index an axis, in the order of `AXES`."""

    pp: int = 0
    dp: int = 0
    fsdp: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The degrees of parallelism of one assignment.

    `dp` counts replicas, `fsdp` shards (`dp x fsdp` is HSDP); `ep` folds out of
    `fsdp x cp x tp` for expert tensors; `zero` says what `fsdp` shards
    (Rajbhandari et al., ZeRO, 2020: 0 nothing, 1 optimizer state, 2 and gradients,
    3 and parameters); `vp` is how many stages of the pipeline lie on each of its ranks.

    Raises `InvalidLayout` if a degree is not a positive integer or does not fold.
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
                raise InvalidLayout(f"{axis}={getattr(self, axis)}: a degree is at least 1")
        if self.zero not in STAGES:
            raise InvalidLayout(f"zero={self.zero}: the ZeRO stage is 0, 1, 2 or 3")
        if (self.fsdp * self.cp * self.tp) % self.ep:
            raise InvalidLayout(
                f"ep={self.ep} does not divide fsdp x cp x tp = {self.fsdp * self.cp * self.tp}"
            )

        if self.vp > 1 and self.pp == 1:
            raise InvalidLayout(f"vp={self.vp}: several stages a rank need a pipeline; set pp")

    @property
    def degrees(self) -> tuple[int, ...]:
        """The size of each mesh axis, in the order of `AXES`."""
        return (self.pp, self.dp, self.fsdp, self.cp, self.tp)

    @property
    def num_workers(self) -> int:
        return prod(self.degrees)

    @property
    def num_data_ranks(self) -> int:
        """How many ranks read different samples of a batch."""
        return self.dp * self.fsdp

    def coordinates(self, world_rank: int) -> Coordinates:
        """The place of a world rank in the mesh (invariant 1: the inverse of `world_rank`)."""
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
        """Which of the ranks that read different samples this one is."""
        place = self.coordinates(world_rank)
        return place.dp * self.fsdp + place.fsdp

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The world ranks of each group along an axis; they partition all (invariant 1)."""
        place = AXES.index(axis)
        stride = prod(self.degrees[place + 1 :])
        degree = self.degrees[place]
        firsts = (r for r in range(self.num_workers) if (r // stride) % degree == 0)
        return tuple(tuple(r + i * stride for i in range(degree)) for r in firsts)

    def __str__(self) -> str:
        parts = [f"{axis}={getattr(self, axis)}" for axis in (*AXES, "ep", "vp")]
        told = [part for part in parts if not part.endswith("=1")]
        told += [f"zero={self.zero}"] if self.zero != 3 else []
        return ",".join(told) or "dp=1"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `dp=2,tp=2`; `zero` may be a name of FSDP's, as in `fsdp=4,zero=FULL_SHARD`.

        Raises `InvalidLayout` for an unknown axis, a bad number or name.
        """
        known = {field.name for field in fields(cls)}
        degrees: dict[str, int] = {}
        for part in text.replace(" ", "").split(","):
            axis, _, value = part.partition("=")
            if axis not in known:
                raise InvalidLayout(f"'{part}': not an axis; write e.g. dp=2,fsdp=2 ({text!r})")
            if axis in degrees:
                raise InvalidLayout(f"'{axis}' stands twice in {text!r}")
            if axis == "zero":
                degrees[axis] = parse_stage(value)
                continue
            if not (value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS):
                raise InvalidLayout(f"'{part}': the degree is a whole number, e.g. {axis}=2")
            degrees[axis] = int(value)
        if HYBRID in text.upper() and degrees.get("dp", 1) == 1:
            raise InvalidLayout(
                f"zero={HYBRID}: it means shards within replicas, so name dp=2 or more, e.g. "
                f"dp=2,fsdp=2,zero={HYBRID}; without replicas it is zero=FULL_SHARD ({text!r})"
            )
        return cls(**degrees)
