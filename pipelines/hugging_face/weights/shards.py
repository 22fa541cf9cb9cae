"""Writer of safetensors files in bounded memory: regions are read and written by windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from elastic.geometry.regions import Region
from pipelines.hugging_face.weights.names import StoredTensor, TensorShape
from pipelines.settings.safetensors_format import bytes_of, header_of, with_length

RegionReader = Callable[[Mapping[str, Region]], Mapping[str, Tensor]]
"""Reads regions of our tensors, by name."""

FileWindow = list[tuple[StoredTensor, Region]]
"""The regions of stored tensors that are read at once."""


def deal(
    tensors: Sequence[StoredTensor], itemsize: int, shard_bytes: int
) -> list[list[StoredTensor]]:
    """Distribute tensors in order to files of up to `shard_bytes`; a larger tensor gets its own."""
    shards: list[list[StoredTensor]] = []
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
    file: Path,
    tensors: Sequence[StoredTensor],
    dtype: torch.dtype,
    read: RegionReader,
    window_bytes: int,
) -> None:
    """Write one file; memory holds one window and its parts. Raises `OSError`."""
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


def _windows(tensors: Sequence[StoredTensor], max_elements: int) -> Iterator[FileWindow]:
    """All elements in order: small tensors share a window, large ones are cut into slabs of rows.

    A window holds at most one slab of a tensor.
    """
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
    regions = {}
    for tensor, slab in window:
        for part in tensor.parts:
            if overlap := part.region.intersection(slab):
                regions[part.name] = _relative_to(part.region, overlap)
    values = dict(read(regions))
    for tensor, slab in window:
        pieces = []
        for part in tensor.parts:
            if overlap := part.region.intersection(slab):
                pieces.append((_relative_to(slab, overlap), values.pop(part.name)))
        yield _assemble(slab.shape, pieces)


def _assemble(shape: TensorShape, pieces: list[tuple[Region, Tensor]]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0][1]
    whole = torch.empty(shape, dtype=pieces[0][1].dtype)
    for (offsets, lengths), piece in pieces:
        ends = zip(offsets, lengths, strict=True)
        whole[tuple(slice(first, first + length) for first, length in ends)] = piece
    return whole


def _relative_to(outer: Region, inner: Region) -> Region:
    """The inner region, with offsets relative to the start of the outer one."""
    offsets = tuple(a - b for a, b in zip(inner.offsets, outer.offsets, strict=True))
    return Region(offsets, inner.shape)
