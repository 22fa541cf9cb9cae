"""Regions: axis-aligned boxes of a logical tensor, their chunks and their overlaps.

A dim is cut as `torch.chunk` and DTensor's `Shard` cut it: chunks of `ceil(size / num_chunks)`
elements, the last ones shorter or empty. Chunk boundaries are therefore multiples of one
number, and two divisions find the chunks that overlap an interval. No search compares all
pairs of regions.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple


class Region(NamedTuple):
    """A box of one logical tensor: its offsets and its shape, in elements.

    The region of a scalar has no dims and one element.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """The region of an undivided tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def chunk(self, dim: int, num_chunks: int, index: int) -> Region:
        """The chunk at `index` of `num_chunks` along `dim`, possibly empty."""
        begin, length = chunk_interval(self.shape[dim], num_chunks, index)
        return self._with_interval(dim, self.offsets[dim] + begin, length)

    def intersection(self, other: Region) -> Region | None:
        """The region that both contain, or None if it has no element."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Region(offsets, shape) if min(shape, default=1) > 0 else None

    def overlapping_chunks(self, dim: int, num_chunks: int, other: Region) -> range:
        """The indices of this region's chunks along `dim` that overlap `other` there."""
        chunk = _ceil_div(self.shape[dim], num_chunks)
        begin = max(other.offsets[dim] - self.offsets[dim], 0)
        end = min(other.offsets[dim] + other.shape[dim] - self.offsets[dim], self.shape[dim])
        return range(begin // chunk, _ceil_div(end, chunk)) if begin < end else range(0)

    def _ends(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.offsets, self.shape, strict=True)))

    def _with_interval(self, dim: int, begin: int, length: int) -> Region:
        return Region(
            (*self.offsets[:dim], begin, *self.offsets[dim + 1 :]),
            (*self.shape[:dim], length, *self.shape[dim + 1 :]),
        )


def chunk_interval(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """The begin and length of one chunk of a dim of `size` elements, as in DTensor's `Shard`."""
    chunk = _ceil_div(size, num_chunks)
    begin = min(index * chunk, size)
    return begin, min(chunk, size - begin)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
