"""Columns: one long sequence of integers that lies in a row of Arrow IPC files."""

from __future__ import annotations

import os
from bisect import bisect_right
from hashlib import sha256
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from pipelines.data.index import FORMAT, ShardFile, damaged
from pipelines.errors import UserError

NUM_BATCH_ROWS = 1 << 20
"""Rows of a record batch: what a writer holds in memory."""
NUM_SHARD_ROWS = 1 << 26
"""Rows of a file."""


def schema_of(name: str, dtype: str) -> pa.Schema:
    field = pa.field(name, pa.from_numpy_dtype(np.dtype(dtype)), nullable=False)
    return pa.schema([field], metadata={"format": FORMAT})


class ColumnWriter:
    """Writes a column, in memory bounded by one record batch, to files `<prefix>-00000.arrow`...

    A context manager; `files` is complete and on the disk after `close`.
    """

    def __init__(
        self, folder: Path, prefix: str, name: str, dtype: str, num_shard_rows: int
    ) -> None:
        self.files: list[ShardFile] = []
        self.num_rows = 0
        self._folder = folder
        self._prefix = prefix
        self._schema = schema_of(name, dtype)
        self._num_shard_rows = num_shard_rows
        self._buffer = np.empty(min(NUM_BATCH_ROWS, num_shard_rows), dtype)
        self._num_buffered = 0
        self._sha256 = sha256()
        self._shard: Shard | None = None

    def append(self, values: np.ndarray) -> None:
        """Add values (1-D) at the end of the column."""
        self.num_rows += len(values)
        while len(values):
            room = len(self._buffer) - self._num_buffered
            piece, values = values[:room], values[room:]
            self._buffer[self._num_buffered : self._num_buffered + len(piece)] = piece
            self._num_buffered += len(piece)
            if self._num_buffered == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        rows = self._buffer[: self._num_buffered]
        self._num_buffered = 0
        if self._shard is None:
            name = f"{self._prefix}-{len(self.files):05d}.arrow"
            self._shard = Shard(self._folder / name, self._schema)
        self._shard.write(rows)
        self._sha256.update(rows.data)
        if self._shard.num_rows + len(self._buffer) > self._num_shard_rows:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self.files.append(self._shard.finish(self._sha256.hexdigest()))
            self._shard = None

    def close(self) -> None:
        if self._num_buffered:
            self._flush()
        self._finish_shard()

    def __enter__(self) -> ColumnWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._shard is not None:
            self._shard.abandon()


class Shard:
    """One Arrow IPC file that is being written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.num_rows = 0
        self._path = path
        self._schema = schema
        self._file = path.open("wb")
        self._writer = pa.ipc.new_file(self._file, schema)

    def write(self, rows: np.ndarray) -> None:
        self._writer.write_batch(pa.record_batch([pa.array(rows)], schema=self._schema))
        self.num_rows += len(rows)

    def finish(self, digest: str) -> ShardFile:
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        num_bytes = self._file.tell()
        self._file.close()
        return ShardFile(
            name=self._path.name, num_bytes=num_bytes, num_rows=self.num_rows, sha256=digest
        )

    def abandon(self) -> None:
        self._file.close()


class Column:
    """A column, memory-mapped: only the pages that are read take memory.

    Raises `UserError`, naming the file, if one is missing, of another size, or no Arrow file of
    this column: a matter of microseconds a file. What lies inside is checked by `verify`.
    """

    def __init__(self, folder: Path, name: str, dtype: str, files: tuple[ShardFile, ...]) -> None:
        self._folder = folder
        self._files = files
        self._chunks: list[np.ndarray] = []
        self._firsts: list[int] = []
        self._ends: list[int] = []
        self.num_rows = 0
        for file in files:
            for chunk in open_shard(folder / file.name, file, schema_of(name, dtype)):
                self._firsts.append(self.num_rows)
                self._chunks.append(chunk)
                self.num_rows += len(chunk)
            self._ends.append(len(self._chunks))

    def read_into(self, first: int, out: np.ndarray) -> None:
        """Copy the rows from `first` on into `out` (1-D, any integer dtype that is wide enough)."""
        if first < 0 or first + len(out) > self.num_rows:
            raise IndexError(f"rows {first}..{first + len(out)} of {self.num_rows}")
        place = bisect_right(self._firsts, first) - 1
        num_done = 0
        while num_done < len(out):
            offset = first + num_done - self._firsts[place]
            piece = self._chunks[place][offset : offset + len(out) - num_done]
            out[num_done : num_done + len(piece)] = piece
            num_done += len(piece)
            place += 1

    def count_up_to(self, value: int) -> int:
        """How many rows are at most `value`, in a column that ascends."""
        place = bisect_right(self._chunks, value, key=lambda chunk: int(chunk[0])) - 1
        if place < 0:
            return 0
        return self._firsts[place] + int(self._chunks[place].searchsorted(value, side="right"))

    def verify(self) -> None:
        """Read everything; raise `UserError` with the first file whose content has changed."""
        digest = sha256()
        for file, begin, end in zip(self._files, [0, *self._ends], self._ends, strict=False):
            for chunk in self._chunks[begin:end]:
                digest.update(chunk.data)
            if digest.hexdigest() != file.sha256:
                raise damaged(self._folder / file.name)


def open_shard(path: Path, file: ShardFile, schema: pa.Schema) -> list[np.ndarray]:
    """The record batches of one file as read-only views of the mapped memory."""
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
            chunks = [view_of(reader.get_batch(i)) for i in range(reader.num_record_batches)]
    except (OSError, pa.ArrowException) as error:
        raise damaged(path) from error
    if sum(map(len, chunks)) != file.num_rows:
        raise damaged(path)
    return [chunk for chunk in chunks if len(chunk)]


def view_of(batch: pa.RecordBatch) -> np.ndarray:
    batch.validate()
    return batch.column(0).to_numpy(zero_copy_only=True)
