"""A map-style dataset of the rows of Parquet or Arrow files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from actors.storage.remote_files import RemoteFile
from pipelines.data.cache import LocalCopies
from pipelines.data.cache.shared_indexes import INDEXES, IndexEntry, digest_of
from pipelines.data.source_files import Named, SourceFile, named_files, place_of, state_of
from pipelines.errors import UserError
from pipelines.reading.concatenated import Concatenated
from pipelines.settings import CacheSettings

SUFFIXES = (".parquet", ".arrow")
NUM_GROUPS_KEPT = 8
"""Parquet row groups that are cached decoded, because rows are read in a shuffled order."""


class ArrowDataset(Concatenated):
    """Rows as dicts by column: numbers, strings, and lists of numbers as numpy arrays.

    `path` is a file, a folder or a glob, or a list of these, also at URLs, from where each file is
    copied to the cache of the machine when a row of it is first read (an `.arrow` file at once);
    `cache` are its settings. `columns` are the columns to read (None: all). `.arrow` files (IPC)
    are memory-mapped. Of `.parquet` files the latest row groups are cached decoded, so write small
    row groups (a few thousand rows) for reading in random order.
    """

    opened = ("_table", "_copies", "_groups", "_ends")

    def __init__(
        self,
        path: Named,
        columns: Sequence[str] | None = None,
        cache: CacheSettings | None = None,
    ) -> None:
        """Raises `UserError` if there is no such file, or a file cannot be read."""
        self.columns = list(columns) if columns is not None else None
        self.cache = cache or CacheSettings()
        self.files = named_files(path, SUFFIXES)
        self._name = f"rows {path}"
        self._open()

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, from_end = self._located(index)
        file, group, num_rows = self._groups[number]
        table, row = self._table(file, group), from_end + num_rows
        return {name: _value(table.column(name)[row]) for name in table.column_names}

    def _open(self) -> None:
        self._table = lru_cache(NUM_GROUPS_KEPT)(self._read)
        self._copies = LocalCopies(self.cache)
        counts = [self._counts_of(file) for file in self.files]
        INDEXES.note(self._name, [_entry(*pair) for pair in zip(self.files, counts, strict=True)])
        self._groups = [
            (file, group, num_rows)
            for file, groups in zip(self.files, counts, strict=True)
            for group, num_rows in enumerate(groups)
        ]
        self._ends = list(accumulate(num_rows for _, _, num_rows in self._groups))
        if not self._ends or not self._ends[-1]:
            raise UserError(f"{self.files[0]}: has no rows")

    def _counts_of(self, file: SourceFile) -> list[int]:
        """The number of rows of each row group of a file, as counted where the run was started."""
        if (kept := INDEXES.find(self._name, _identity(file), self._copies)) is not None:
            counts: list[int] = np.frombuffer(kept, "<i8").tolist()
            return counts
        try:
            if file.suffix == ".arrow":
                return [self._read(file, 0).num_rows]
            metadata = _metadata(file)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file}: cannot be read ({error})") from None
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def _read(self, file: SourceFile, group: int) -> pa.Table:
        path = self._copies.path_of(file) if isinstance(file, RemoteFile) else file
        if file.suffix != ".arrow":
            with pq.ParquetFile(path) as table:
                rows = table.read_row_group(group, columns=self.columns, use_threads=False)
            if isinstance(file, RemoteFile):
                self._copies.release(file)
            return rows
        with pa.memory_map(str(path)) as source:
            try:
                table = pa.ipc.open_file(source).read_all()
            except pa.ArrowInvalid:  # Hugging Face's `datasets` write streams
                table = pa.ipc.open_stream(source).read_all()
        return table.select(self.columns) if self.columns is not None else table


def _identity(file: SourceFile) -> str:
    return f"{place_of(file)} {state_of(file)}"


def _entry(file: SourceFile, counts: list[int]) -> IndexEntry:
    content = np.array(counts, "<i8").tobytes()
    return IndexEntry(str(file), _identity(file), lambda: content, partial(digest_of, [content]))


def _metadata(file: SourceFile) -> pq.FileMetaData:
    if not isinstance(file, RemoteFile):
        return pq.read_metadata(file)
    with file.system.open_input_file(file.path) as opened:
        return pq.read_metadata(opened)


def _value(cell: pa.Scalar) -> Any:
    """The Python value of a cell; lists become numpy arrays."""
    value = cell.as_py()
    return np.array(value) if isinstance(value, list) else value
