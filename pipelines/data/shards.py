"""Shards: the Arrow files of columns, mapped into memory; here those of a folder on a disk."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from pipelines.data.index import ShardFile, damaged
from pipelines.errors import UserError


class OpenShard:
    """The rows of one file; `chunks` are read-only views of mapped memory, one a record batch."""

    def __init__(self, chunks: list[np.ndarray]) -> None:
        self.chunks = [chunk for chunk in chunks if len(chunk)]
        self._firsts: list[int] = []
        self.num_rows = 0
        for chunk in self.chunks:
            self._firsts.append(self.num_rows)
            self.num_rows += len(chunk)

    def read_into(self, first: int, out: np.ndarray) -> int:
        """Copy the rows from `first` on, as many as there are and find room; returns how many."""
        num_done, place = 0, bisect_right(self._firsts, first) - 1
        while num_done < len(out) and place < len(self.chunks):
            offset = first + num_done - self._firsts[place]
            piece = self.chunks[place][offset : offset + len(out) - num_done]
            out[num_done : num_done + len(piece)] = piece
            num_done += len(piece)
            place += 1
        return num_done

    def count_up_to(self, value: int) -> int:
        """How many rows are at most `value`, if they ascend."""
        place = bisect_right(self.chunks, value, key=lambda chunk: int(chunk[0])) - 1
        if place < 0:
            return 0
        return self._firsts[place] + int(self.chunks[place].searchsorted(value, side="right"))


class Shards(Protocol):
    """The files of a folder of prepared data, by name, wherever it is."""

    def add(self, file: ShardFile, schema: pa.Schema) -> None:
        """There is this file, of a column of this schema. Raises `UserError` if that can be seen
        to be wrong."""

    def opened(self, name: str) -> OpenShard:
        """A file that was added. Raises `UserError` if it is not what it should be."""

    def place_of(self, name: str) -> str:
        """Where a file lies, for messages."""


class FolderShards:
    """The files of a folder on this machine: opened at once, and for good."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, OpenShard] = {}

    def add(self, file: ShardFile, schema: pa.Schema) -> None:
        self._open[file.name] = open_shard(self._folder / file.name, file, schema)

    def opened(self, name: str) -> OpenShard:
        return self._open[name]

    def place_of(self, name: str) -> str:
        return str(self._folder / name)


def open_shard(path: Path, file: ShardFile, schema: pa.Schema) -> OpenShard:
    """Map one file. Raises `UserError`, naming it, if it is not what the index says."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != file.num_bytes:
            raise UserError(
                f"{path}: holds {num_bytes} bytes, not {file.num_bytes}: cut off or replaced; "
                f"delete {path.parent} and prepare the data again"
            )
        # The views keep the mapping alive, not the file: many shards must not use up descriptors.
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as reader:
            if not reader.schema.equals(schema, check_metadata=True):
                raise damaged(path)
            shard = OpenShard(
                [view_of(reader.get_batch(i)) for i in range(reader.num_record_batches)]
            )
    except (OSError, pa.ArrowException) as error:
        raise damaged(path) from error
    if shard.num_rows != file.num_rows:
        raise damaged(path)
    return shard


def view_of(batch: pa.RecordBatch) -> np.ndarray:
    batch.validate()
    return batch.column(0).to_numpy(zero_copy_only=True)
