"""A checkpoint shard file: safetensors with checksums in its header, read in verified blocks.

The format is that of the Hugging Face storage of `torch.distributed.checkpoint` (DCP), which can
read these files. The manifest has the header's checksum, the header those of the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from actors.runtime.program import WrittenPart
from actors.storage.errors import DamagedCheckpoint
from actors.storage.storage import Storage
from elastic.geometry.regions import Region
from elastic.protocol.events import PartFile as WrittenFile
from pipelines.settings.safetensors_format import DTYPES, LENGTH, bytes_of, header_of, with_length

OFFSETS, SAVED_OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""The header fields in which DCP's Hugging Face storage keeps the offsets of each tensor."""
BLOCK_BYTES = 1 << 22
"""The unit of checksums; a reader reads full blocks."""
WINDOW_BYTES = 1 << 26
"""Maximum bytes of one read, except for a single row."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors."""

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class FilePiece:
    """A tensor's region in a file, and the offset of its bytes after the header."""

    region: Region
    dtype: torch.dtype
    begin: int

    @property
    def row_bytes(self) -> int:
        """The bytes of one index of the first dim; of the tensor, if it has no dim."""
        return prod(self.region.shape[1:]) * self.dtype.itemsize


def write_part(
    storage: Storage, name: str, parts: Mapping[str, tuple[Region, Tensor]]
) -> WrittenPart:
    """Write one worker's regions (host tensors) to one file; it is durable on return.

    Raises `OSError` if the write fails, `ValueError` if a tensor does not have its region's shape.
    """
    for key, (region, tensor) in parts.items():
        if tuple(tensor.shape) != region.shape:
            raise ValueError(f"{key}: tensor of shape {tuple(tensor.shape)} for {region}")
    # Widest elements first keeps all tensors aligned; the format allows no gaps.
    order = sorted(parts, key=lambda key: (-parts[key][1].itemsize, key))
    memories = [bytes_of(parts[key][1]) for key in order]
    metadata = {
        OFFSETS: json.dumps({k: {SAVED_OFFSETS: r.offsets} for k, (r, _) in parts.items()}),
        "block_bytes": str(BLOCK_BYTES),
        "crc32": json.dumps(_checksums(memories)),
    }
    entries = ((key, parts[key][1].dtype, parts[key][0].shape) for key in order)
    header = header_of(entries, metadata)
    head = with_length(header)
    with storage.writing(name) as out:
        out.write(head)
        for memory in memories:
            out.write(memory)
    return WrittenPart(len(head) + sum(map(len, memories)), crc32(header), len(header))


class PartFileReader:
    """Reads one checkpoint shard file. All methods raise `DamagedCheckpoint` if the content is not
    what was written, `OSError` if the storage fails."""

    def __init__(self, storage: Storage, file: WrittenFile, prefetch_bytes: int = 0) -> None:
        """Read the header and, in the same request, `prefetch_bytes` of the data after it, which
        are kept until `drop_buffers`."""
        self._storage = storage
        self._name = file.name
        num_bytes = file.num_bytes
        self.drop_buffers()
        length = file.header_bytes or LENGTH.unpack(self._read(0, LENGTH.size))[0]
        begin = LENGTH.size + length
        if begin > num_bytes or length > MAX_HEADER_BYTES:
            raise self._damaged("header has an impossible length")
        head = self._read(0, min(begin + prefetch_bytes, num_bytes))
        header = head[LENGTH.size : begin]
        if LENGTH.unpack(head[: LENGTH.size])[0] != length or crc32(header) != file.checksum:
            raise self._damaged("header does not match the manifest's checksum")
        fields = json.loads(bytes(header))
        metadata = fields.pop("__metadata__")
        self._block_bytes = int(metadata["block_bytes"])
        self._checksums: list[int] = json.loads(metadata["crc32"])
        self._begin, self._end = begin, num_bytes
        self._prefetched = head[begin:]
        offsets = json.loads(metadata[OFFSETS])
        self.pieces = {
            key: FilePiece(
                Region(tuple(offsets[key][SAVED_OFFSETS]), tuple(field["shape"])),
                BY_NAME[field["dtype"]],
                field["data_offsets"][0],
            )
            for key, field in fields.items()
        }

    def copy_all(self, boxes: Sequence[tuple[str, Region, Tensor]]) -> None:
        """Copy boxes of pieces (offsets within the piece) to tensors of their shapes.

        Adjacent blocks are read together. No buffer is kept.
        """
        boxes = sorted(boxes, key=lambda entry: self.pieces[entry[0]].begin)
        self._runs = self._runs_of(boxes)
        for key, box, target in boxes:
            self._copy(key, box, target)
        self.drop_buffers()

    def _runs_of(self, boxes: Sequence[tuple[str, Region, Tensor]]) -> list[tuple[int, int]]:
        """The ranges of blocks that contain these boxes, in file order."""
        runs: list[tuple[int, int]] = []
        for key, box, _ in boxes:
            piece = self.pieces[key]
            begin, row_bytes = piece.begin, piece.row_bytes
            first_row, num_rows = (box.offsets[0], box.shape[0]) if box.shape else (0, 1)
            first = (begin + first_row * row_bytes) // self._block_bytes
            last = ceil((begin + (first_row + num_rows) * row_bytes) / self._block_bytes)
            if runs and first <= runs[-1][1]:
                first, last = runs[-1][0], max(last, runs.pop()[1])
            runs.append((first, last))
        return runs

    def _copy(self, key: str, box: Region, target: Tensor) -> None:
        piece = self.pieces[key]
        if not box.shape:
            target.copy_(torch.frombuffer(bytearray(self._rows(piece, 0, 1)), dtype=piece.dtype)[0])
            return
        shape, itemsize = piece.region.shape, piece.dtype.itemsize
        num_rows = max(1, WINDOW_BYTES // (prod(shape[1:]) * itemsize))
        cuts = [*range(0, box.shape[0], num_rows), box.shape[0]]
        inner = [slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True)]
        inner[-1] = slice(inner[-1].start * itemsize, inner[-1].stop * itemsize)
        for first, last in pairwise(cuts):
            memory = self._rows(piece, box.offsets[0] + first, last - first)
            *sizes, width = last - first, *shape[1:]
            rows = np.frombuffer(memory, np.uint8).reshape(*sizes, width * itemsize)
            target_rows = target[first:last].view(torch.uint8).numpy()
            target_rows[...] = rows[(slice(None), *inner[1:])]

    def drop_buffers(self) -> None:
        """Release all bytes that were read."""
        self._first = self._last = 0
        self._data_bytes = self._prefetched = memoryview(b"")
        self._runs = []

    def _rows(self, piece: FilePiece, first: int, num_rows: int) -> memoryview:
        begin = piece.begin + first * piece.row_bytes
        return self._verified(begin, begin + num_rows * piece.row_bytes)

    def _verified(self, begin: int, end: int) -> memoryview:
        """Bytes of the data section, from blocks whose checksums are verified."""
        size = self._block_bytes
        first, last = begin // size, ceil(end / size)
        if not self._first <= first <= last <= self._last:
            window_end = first + max(1, WINDOW_BYTES // size)
            ends = (min(end, window_end) for begin, end in self._runs if begin <= first < end)
            last = max([last, *ends])
            data = self._data(first * size, min(last * size, self._end - self._begin))
            for index, block in enumerate(_cut(data, size), first):
                if crc32(block) != self._checksums[index]:
                    offset = self._begin + index * size
                    raise self._damaged(f"checksum mismatch in the block at byte {offset}")
            self._first, self._last, self._data_bytes = first, last, data
        offset = begin - self._first * size
        return self._data_bytes[offset : offset + end - begin]

    def _data(self, begin: int, end: int) -> memoryview:
        """Bytes of the data section, from memory if they were prefetched."""
        if end <= len(self._prefetched):
            return self._prefetched[begin:end]
        return self._read(self._begin + begin, end - begin)

    def _read(self, offset: int, num_bytes: int) -> memoryview:
        try:
            content = self._storage.read(self._name, offset, num_bytes)
        except FileNotFoundError:
            raise self._damaged("file not found") from None
        if len(content) != num_bytes:
            raise self._damaged("file is truncated")
        return memoryview(content)

    def _damaged(self, reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self._storage.at(self._name).url}: {reason}")


def _cut(memory: memoryview, size: int) -> Iterator[memoryview]:
    return (memory[first : first + size] for first in range(0, len(memory), size))


def _checksums(memories: list[memoryview]) -> list[int]:
    """The checksum of each block of the concatenation of these buffers."""
    checksums, filled = [0], 0
    for memory in memories:
        begin = 0
        while begin < len(memory):
            if filled == BLOCK_BYTES:
                checksums.append(0)
                filled = 0
            piece = memory[begin : begin + BLOCK_BYTES - filled]
            checksums[-1] = crc32(piece, checksums[-1])
            begin, filled = begin + len(piece), filled + len(piece)
    return checksums if filled else []
