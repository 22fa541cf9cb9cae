"""Columns: long sequences of integers, each stored in a series of Arrow IPC files."""

from __future__ import annotations

import os
from bisect import bisect_right
from hashlib import sha256
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from pipelines.data.shards import FORMAT, ShardFile, Shards, damaged

NUM_BATCH_ROWS = 1 << 20
"""Rows of a record batch, which a writer holds in memory."""
NUM_SHARD_ROWS = 1 << 26
"""Rows of a file."""


def schema_of(name: str, dtype: str) -> pa.Schema:
    """The schema of a column's files."""
    field = pa.field(name, pa.from_numpy_dtype(np.dtype(dtype)), nullable=False)
    return pa.schema([field], metadata={"format": FORMAT})


class ColumnWriter:
    """Writer of a column to files `<prefix>-00000.arrow`..., holding one record batch in memory.

    A context manager; `files` is complete and durable after `close`.
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
    """An Arrow IPC file while it is written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.num_rows = 0
        self._path = path
        self._schema = schema
        self._first: int | None = None
        self._file = HashedFile(path)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._file, "w"), schema)

    def write(self, rows: np.ndarray) -> None:
        if self._first is None:
            self._first = int(rows[0])
        self._writer.write_batch(pa.record_batch([pa.array(rows)], schema=self._schema))
        self.num_rows += len(rows)

    def finish(self, digest: str) -> ShardFile:
        self._writer.close()
        self._file.finish()
        return ShardFile(
            name=self._path.name,
            num_bytes=self._file.num_bytes,
            num_rows=self.num_rows,
            sha256=digest,
            checksum=self._file.checksum,
            first=self._first,
        )

    def abandon(self) -> None:
        self._file.close()


class HashedFile:
    """A new file that computes the SHA-256 of everything written to it."""

    def __init__(self, path: Path) -> None:
        self.num_bytes = 0
        self.closed = False
        self._file = path.open("wb")
        self._sha256 = sha256()

    @property
    def checksum(self) -> str:
        return self._sha256.hexdigest()

    def write(self, data: bytes) -> int:
        self._sha256.update(data)
        self.num_bytes += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        """Make the file durable and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        self.closed = True
        self._file.close()


class Column:
    """A memory-mapped column: only the pages that are read take memory.

    Raises `UserError`, naming the file, if a local file is missing, of another size, or not an
    Arrow file of this column; this check takes microseconds a file. `verify` checks the contents.
    Fetched files are checked whenever they are fetched.
    """

    def __init__(self, shards: Shards, name: str, dtype: str, files: tuple[ShardFile, ...]) -> None:
        self._shards = shards
        self._files = files
        self._firsts: list[int] = []
        self.num_rows = 0
        schema = schema_of(name, dtype)
        for file in files:
            shards.add(file, schema)
            self._firsts.append(self.num_rows)
            self.num_rows += file.num_rows

    def files_of(self, first: int, num_rows: int) -> list[str]:
        """The names of the files that hold these rows."""
        places = range(self._place(first), self._place(first + max(num_rows, 1) - 1) + 1)
        return [self._files[place].name for place in places]

    def read_into(self, first: int, out: np.ndarray) -> None:
        """Copy the rows from `first` on into `out` (1-D, any integer dtype that is wide enough)."""
        if first < 0 or first + len(out) > self.num_rows:
            raise IndexError(f"rows {first}..{first + len(out)} of {self.num_rows}")
        num_done, place = 0, self._place(first)
        while num_done < len(out):
            shard = self._shards.opened(self._files[place].name)
            num_done += shard.read_into(first + num_done - self._firsts[place], out[num_done:])
            place += 1

    def files_between(self, low: int, high: int) -> list[str]:
        """The names of the files with values over `low` up to `high`; the column must ascend."""
        first, last = self._place_of(low), self._place_of(high)
        return [file.name for file in self._files[max(first, 0) : last + 1]]

    def count_up_to(self, value: int) -> int:
        """The number of rows that are at most `value`; the column must ascend."""
        place = self._place_of(value)
        if place < 0:
            return 0
        shard = self._shards.opened(self._files[place].name)
        return self._firsts[place] + shard.count_up_to(value)

    def verify(self) -> None:
        """Read everything; raise `UserError` naming the first file whose content has changed."""
        digest = sha256()
        for file in self._files:
            for chunk in self._shards.opened(file.name).chunks:
                digest.update(chunk.data)
            if digest.hexdigest() != file.sha256:
                raise damaged(self._shards.place_of(file.name))

    def _place(self, row: int) -> int:
        return bisect_right(self._firsts, row) - 1

    def _place_of(self, value: int) -> int:
        """The index of the file with the last row of at most `value`; -1 if there is none."""
        return bisect_right(range(len(self._files)), value, key=self._first_value) - 1

    def _first_value(self, place: int) -> int:
        first = self._files[place].first
        if first is not None:
            return first
        return int(self._shards.opened(self._files[place].name).chunks[0][0])
