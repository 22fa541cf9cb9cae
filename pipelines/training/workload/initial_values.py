"""Initial values of parameters, drawn by region: a rank draws only the regions that it holds.

A tensor is cut into tiles. Each tile is the stream of a counter-based generator (Philox; Salmon et
al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011) under the key (seed, name), with the tile's
index in the counter. So every layout draws the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from math import erf, inf, sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from elastic.geometry.regions import Region
from pipelines.training.workload.workload import nothing

TILE_ROWS, TILE_COLUMNS = 32, 512
"""Tile size in the last two dims. A region's border wastes at most one tile; smaller tiles cost
Python time."""
VECTOR_TILE = (1, TILE_ROWS * TILE_COLUMNS)
"""The tile of a tensor of one dim: the same number of values, in one row."""
TILES_PER_CHECK = 64
"""Tiles between two calls of `interrupt`: a million values, about 15 ms."""


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Independent normal values."""

    mean: float
    std: float


@dataclass(frozen=True)
class Uniform:
    """Independent values, uniform from `low` to `high`."""

    low: float
    high: float


@dataclass(frozen=True)
class TruncatedNormal:
    """Independent normal values between bounds, by inverse transform sampling:
    `mean + scale * erfinv(uniform values)`."""

    low: float
    high: float
    """Bounds of the uniform values."""
    scale: float = 1.0
    mean: float = 0.0
    minimum: float = -inf
    maximum: float = inf

    @classmethod
    def between(cls, mean: float, std: float, minimum: float, maximum: float) -> TruncatedNormal:
        """As `torch.nn.init.trunc_normal_`."""
        scale = std * sqrt(2.0)
        low, high = erf((minimum - mean) / scale), erf((maximum - mean) / scale)
        return cls(low, high, scale, mean, minimum, maximum)

    @property
    def is_clamped(self) -> bool:
        return self.minimum > -inf or self.maximum < inf


Distribution = Constant | Normal | Uniform | TruncatedNormal


def kaiming_uniform(fan_in: int, slope: float = 0.0) -> Uniform:
    """As `torch.nn.init.kaiming_uniform_` (He et al., Delving Deep into Rectifiers, 2015)."""
    bound = sqrt(6.0 / ((1.0 + slope**2) * fan_in))
    return Uniform(-bound, bound)


def slices_of(region: Region) -> tuple[slice, ...]:
    """The slices that select a region of a full tensor."""
    return tuple(slice(o, o + n) for o, n in zip(region.offsets, region.shape, strict=True))


def draw(
    distribution: Distribution,
    name: str,
    seed: int,
    shape: tuple[int, ...],
    region: Region,
    interrupt: Callable[[], None] = nothing,
) -> Tensor:
    """Draw a region of the tensor `name` of this shape, as float32 on the host.

    The values depend on (distribution, name, seed, shape) and the position alone: two regions that
    overlap agree. `interrupt` is called every few tiles and may raise.
    """
    if isinstance(distribution, Constant):
        return torch.full(region.shape, distribution.value)
    values = np.empty(region.shape, np.float32)
    key = blake2b(f"initial/{seed}/{name}".encode(), digest_size=16).digest()
    tile_shape = VECTOR_TILE if len(shape) == 1 else (TILE_ROWS, TILE_COLUMNS)
    stream = _Stream(int.from_bytes(key, "little"), tile_shape)
    # The last two dims are tiled; each index of the leading dims selects a separate matrix.
    num_lead = max(0, len(shape) - 2)
    rows, columns = (1, 1, *shape)[-2:]
    row_span, column_span = (_ALL, _ALL, *_spans(region))[-2:]
    matrices = values.reshape(*region.shape[:num_lead], row_span.length, column_span.length)
    tiles_per_matrix = -(-rows // tile_shape[0]) * -(-columns // tile_shape[1])
    num_drawn = 0
    for lead in product(*(range(length) for length in region.shape[:num_lead])):
        index = tuple(o + i for o, i in zip(region.offsets, lead, strict=False))
        matrix = int(np.ravel_multi_index(index, shape[:num_lead])) if index else 0
        for tile in _tiles(row_span, column_span, columns, tile_shape):
            if num_drawn % TILES_PER_CHECK == 0:
                interrupt()
            num_drawn += 1
            drawn = stream.tile(distribution, matrix * tiles_per_matrix + tile.number)
            matrices[lead][tile.target] = drawn[tile.source]
    return torch.from_numpy(values)


class _Span(NamedTuple):
    """A range of one dim."""

    first: int
    length: int


_ALL = _Span(0, 1)
"""The span of a dim that the tensor lacks."""


class _Tile(NamedTuple):
    """A tile's number in its matrix, the slice of it to copy, and the slice to copy it to."""

    number: int
    source: tuple[slice, slice]
    target: tuple[slice, slice]


class _Stream:
    """Draws tiles under one key into one buffer."""

    def __init__(self, key: int, tile_shape: tuple[int, int]) -> None:
        self._philox = np.random.Philox(key=key)
        self._state = self._philox.state
        self._generator = np.random.Generator(self._philox)
        self._buffer = np.empty(tile_shape, np.float32)

    def tile(self, distribution: Normal | Uniform | TruncatedNormal, index: int) -> np.ndarray:
        """Draw the values of a tile; the next call overwrites them."""
        self._state["state"]["counter"][:] = (0, 0, 0, index)
        self._philox.state = self._state
        buffer = self._buffer
        if isinstance(distribution, Normal):
            self._generator.standard_normal(dtype=np.float32, out=buffer)
            scale, shift = distribution.std, distribution.mean
        else:
            self._generator.random(dtype=np.float32, out=buffer)
            scale, shift = distribution.high - distribution.low, distribution.low
        buffer *= np.float32(scale)
        if shift:
            buffer += np.float32(shift)
        if isinstance(distribution, TruncatedNormal):
            values = torch.from_numpy(buffer).erfinv_().mul_(distribution.scale)
            values.add_(distribution.mean).clamp_(distribution.minimum, distribution.maximum)
        return buffer


def _spans(region: Region) -> tuple[_Span, ...]:
    return tuple(_Span(o, n) for o, n in zip(region.offsets, region.shape, strict=True))


def _tiles(
    rows: _Span, columns: _Span, num_columns: int, tile_shape: tuple[int, int]
) -> Iterator[_Tile]:
    """The tiles of a matrix that overlap a box."""
    per_row = -(-num_columns // tile_shape[1])
    for row, *in_rows in _cuts(rows, tile_shape[0]):
        for column, *in_columns in _cuts(columns, tile_shape[1]):
            source, target = zip(in_rows, in_columns, strict=True)
            yield _Tile(row * per_row + column, source, target)


def _cuts(span: _Span, size: int) -> Iterator[tuple[int, slice, slice]]:
    """Each tile of a dim that overlaps a span: its index, source slice and target slice."""
    end = span.first + span.length
    for number in range(span.first // size, -(-end // size)):
        first, last = max(span.first, number * size), min(end, (number + 1) * size)
        source = slice(first - number * size, last - number * size)
        yield number, source, slice(first - span.first, last - span.first)
