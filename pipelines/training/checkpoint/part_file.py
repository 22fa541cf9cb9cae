"""One file of a checkpoint: safetensors, with checksums in its header, read in verified blocks.

The layout is that of the Hugging Face storage of `torch.distributed.checkpoint` (DCP), which reads
these files as well. The header's checksum stands in the manifest, those of the data in the header.
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
"""The header fields in which DCP's Hugging Face storage keeps where each tensor begins."""
BLOCK_BYTES = 1 << 22
"""What has a checksum of its own: a reader takes whole blocks, and few more than it needs."""
WINDOW_BYTES = 1 << 26
"""What is read at a time at most, but for a single row."""
MAX_HEADER_BYTES = 100_000_000
"""As safetensors itself limits it."""

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class FilePiece:
    """A tensor's region in a file, and where its bytes begin behind the header."""

    region: Region
    dtype: torch.dtype
    begin: int

    @property
    def row_bytes(self) -> int:
        """Of one index of the first dim; of the whole, if it has no dim."""
        return prod(self.region.shape[1:]) * self.dtype.itemsize


def write_part(
    storage: Storage, name: str, parts: Mapping[str, tuple[Region, Tensor]]
) -> WrittenPart:
    """Write one worker's regions (host tensors) to one file; durable when it returns.

    Raises `OSError` if the storage refuses, `ValueError` if a tensor has not its region's shape.
    """
    for key, (region, tensor) in parts.items():
        if tuple(tensor.shape) != region.shape:
            raise ValueError(f"{key}: a tensor of {tuple(tensor.shape)} for {region}")
    # The widest elements first keeps all of them aligned; the format wants no gaps.
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
    """One file to be read. Raises `DamagedCheckpoint` wherever it is not what was written,
    `OSError` if the storage does not let it be read."""

    def __init__(self, storage: Storage, file: WrittenFile, ahead_bytes: int = 0) -> None:
        """Reads the header and, in the same request, so many bytes of the data behind it; what is
        left of these is kept until `let_go`."""
        self._storage = storage
        self._name = file.name
        num_bytes = file.num_bytes
        self.let_go()
        length = file.header_bytes or LENGTH.unpack(self._read(0, LENGTH.size))[0]
        begin = LENGTH.size + length
        if begin > num_bytes or length > MAX_HEADER_BYTES:
            raise self._damaged("its header has an impossible length")
        head = self._read(0, min(begin + ahead_bytes, num_bytes))
        header = head[LENGTH.size : begin]
        if LENGTH.unpack(head[: LENGTH.size])[0] != length or crc32(header) != file.checksum:
            raise self._damaged("its header has another checksum than the manifest says")
        fields = json.loads(bytes(header))
        about = fields.pop("__metadata__")
        self._block_bytes = int(about["block_bytes"])
        self._checksums: list[int] = json.loads(about["crc32"])
        self._begin, self._end = begin, num_bytes
        self._ahead = head[begin:]
        offsets = json.loads(about[OFFSETS])
        self.pieces = {
            key: FilePiece(
                Region(tuple(offsets[key][SAVED_OFFSETS]), tuple(field["shape"])),
                BY_NAME[field["dtype"]],
                field["data_offsets"][0],
            )
            for key, field in fields.items()
        }

    def copy_all(self, boxes: Sequence[tuple[str, Region, Tensor]]) -> None:
        """Copy boxes of pieces, their offsets counted within the piece, to tensors of their shapes,
        and keep nothing. What lies side by side in the file is read at once."""
        boxes = sorted(boxes, key=lambda one: self.pieces[one[0]].begin)
        self._runs = self._runs_of(boxes)
        for key, box, target in boxes:
            self._copy(key, box, target)
        self.let_go()

    def _runs_of(self, boxes: Sequence[tuple[str, Region, Tensor]]) -> list[tuple[int, int]]:
        """The ranges of blocks that have these boxes, in order of the file."""
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
            place = target[first:last].view(torch.uint8).numpy()
            place[...] = rows[(slice(None), *inner[1:])]

    def let_go(self) -> None:
        """Keep nothing of what was read in memory."""
        self._first = self._last = 0
        self._held = self._ahead = memoryview(b"")
        self._runs: list[tuple[int, int]] = []

    def _rows(self, piece: FilePiece, first: int, num_rows: int) -> memoryview:
        begin = piece.begin + first * piece.row_bytes
        return self._verified(begin, begin + num_rows * piece.row_bytes)

    def _verified(self, begin: int, end: int) -> memoryview:
        """Bytes behind the header, out of whole blocks whose checksums are right."""
        size = self._block_bytes
        first, last = begin // size, ceil(end / size)
        if not self._first <= first <= last <= self._last:
            most = first + max(1, WINDOW_BYTES // size)
            ends = (min(end, most) for begin, end in self._runs if begin <= first < end)
            last = max([last, *ends])
            held = self._data(first * size, min(last * size, self._end - self._begin))
            for index, block in enumerate(_cut(held, size), first):
                if crc32(block) != self._checksums[index]:
                    place = f"bytes {self._begin + index * size} and on"
                    raise self._damaged(f"{place} have another checksum than when written")
            self._first, self._last, self._held = first, last, held
        offset = begin - self._first * size
        return self._held[offset : offset + end - begin]

    def _data(self, begin: int, end: int) -> memoryview:
        """Bytes behind the header, from memory if they are there."""
        if end <= len(self._ahead):
            return self._ahead[begin:end]
        return self._read(self._begin + begin, end - begin)

    def _read(self, offset: int, num_bytes: int) -> memoryview:
        try:
            found = self._storage.read(self._name, offset, num_bytes)
        except FileNotFoundError:
            raise self._damaged("it is not there") from None
        if len(found) != num_bytes:
            raise self._damaged("it is cut short")
        return memoryview(found)

    def _damaged(self, how: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self._storage.at(self._name).url}: {how}")


def _cut(memory: memoryview, size: int) -> Iterator[memoryview]:
    return (memory[first : first + size] for first in range(0, len(memory), size))


def _checksums(memories: list[memoryview]) -> list[int]:
    """Of each block of what these are one after the other."""
    found, filled = [0], 0
    for memory in memories:
        begin = 0
        while begin < len(memory):
            if filled == BLOCK_BYTES:
                found.append(0)
                filled = 0
            piece = memory[begin : begin + BLOCK_BYTES - filled]
            found[-1] = crc32(piece, found[-1])
            begin, filled = begin + len(piece), filled + len(piece)
    return found if filled else []
