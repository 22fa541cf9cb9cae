"""Safetensors files written from regions that are read a window at a time, whatever their size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from elastic.geometry.regions import Region
from pipelines.hugging_face.names import TensorShape, Whole
from pipelines.settings.safetensors_format import bytes_of, header_of, with_length

RegionReader = Callable[[Mapping[str, Region]], Mapping[str, Tensor]]
"""Regions of our tensors by name, to what they hold."""

FileWindow = list[tuple[Whole, Region]]
"""Which regions of which tensors are read at once."""


def deal(tensors: Sequence[Whole], itemsize: int, shard_bytes: int) -> list[list[Whole]]:
    """Tensors in order to as few files as hold `shard_bytes` each; a larger one is alone in its."""
    shards: list[list[Whole]] = []
    room = 0
    for tensor in tensors:
        num_bytes = itemsize * prod(tensor.shape)
        if num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= num_bytes
    return shards


def write_shard(
    file: Path, tensors: Sequence[Whole], dtype: torch.dtype, read: RegionReader, window_bytes: int
) -> None:
    """Write one file; memory holds a window and what it is made of. Raises `OSError`."""
    header = header_of(((tensor.name, dtype, tensor.shape) for tensor in tensors), {})
    with file.open("wb") as out:
        out.write(with_length(header))
        for window in _windows(tensors, window_bytes // dtype.itemsize):
            _write_window(out, window, dtype, read)


def _write_window(
    out: BinaryIO, window: FileWindow, dtype: torch.dtype, read: RegionReader
) -> None:
    for piece in _read_window(window, read):
        out.write(bytes_of(piece.to(dtype)))


def _windows(tensors: Sequence[Whole], max_elements: int) -> Iterator[FileWindow]:
    """All elements in order: small tensors together, large ones cut into slabs of rows. No two
    slabs of one tensor meet in a window."""
    window: FileWindow = []
    room = max_elements
    for tensor in tensors:
        for slab in _slabs(tensor.shape, max_elements):
            if window and slab.num_elements > room:
                yield window
                window, room = [], max_elements
            window.append((tensor, slab))
            room -= slab.num_elements
    yield window


def _slabs(shape: TensorShape, max_elements: int) -> Iterator[Region]:
    num_rows, *rest = shape
    height = max(1, max_elements // prod(rest))
    for first in range(0, num_rows, height):
        length = min(height, num_rows - first)
        yield Region((first, *(0 for _ in rest)), (length, *rest))


def _read_window(window: FileWindow, read: RegionReader) -> Iterator[Tensor]:
    wanted = {}
    for tensor, slab in window:
        for part in tensor.parts:
            if hit := part.region.intersection(slab):
                wanted[part.name] = _seen_from(part.region, hit)
    found = dict(read(wanted))
    for tensor, slab in window:
        pieces = []
        for part in tensor.parts:
            if hit := part.region.intersection(slab):
                pieces.append((_seen_from(slab, hit), found.pop(part.name)))
        yield _put_together(slab.shape, pieces)


def _put_together(shape: TensorShape, pieces: list[tuple[Region, Tensor]]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0][1]
    whole = torch.empty(shape, dtype=pieces[0][1].dtype)
    for (offsets, lengths), piece in pieces:
        ends = zip(offsets, lengths, strict=True)
        whole[tuple(slice(first, first + length) for first, length in ends)] = piece
    return whole


def _seen_from(outer: Region, inner: Region) -> Region:
    """A region inside of another, by its offsets from where that begins."""
    offsets = tuple(a - b for a, b in zip(inner.offsets, outer.offsets, strict=True))
    return Region(offsets, inner.shape)
