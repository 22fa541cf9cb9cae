"""A map-style dataset of the rows of Parquet or Arrow files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from glob import glob
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import UserError
from pipelines.settings.home import expand_home

SUFFIXES = (".parquet", ".arrow")
NUM_GROUPS_KEPT = 8
"""Parquet row groups that are cached decoded, because rows are read in a shuffled order."""


class ArrowDataset:
    """Rows as dicts by column: numbers, strings, and lists of numbers as numpy arrays.

    `path` is a file, a folder or a glob; `columns` are the columns to read (None: all). `.arrow`
    files (IPC) are memory-mapped. Of `.parquet` files the latest row groups are cached decoded, so
    write small row groups (a few thousand rows) for reading in random order.
    """

    def __init__(self, path: str | Path, columns: Sequence[str] | None = None) -> None:
        """Raises `UserError` if there is no such file, or a file cannot be read."""
        self.columns = list(columns) if columns is not None else None
        self.files = _files(str(path))
        self._open()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        file, group, num_rows = self._groups[number]
        table, row = self._table(file, group), index - self._ends[number] + num_rows
        return {name: _value(table.column(name)[row]) for name in table.column_names}

    def __getstate__(self) -> dict[str, Any]:
        return {"columns": self.columns, "files": self.files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.columns, self.files = state["columns"], state["files"]
        self._open()

    def _open(self) -> None:
        self._table = lru_cache(NUM_GROUPS_KEPT)(self._read)
        self._groups = [group for file in self.files for group in self._groups_of(file)]
        self._ends = list(accumulate(num_rows for _, _, num_rows in self._groups))
        if not self._ends or not self._ends[-1]:
            raise UserError(f"{self.files[0]}: has no rows")

    def _groups_of(self, file: str) -> list[tuple[str, int, int]]:
        """The row groups of a file: (file, index of the group, number of rows)."""
        try:
            if file.endswith(".arrow"):
                return [(file, 0, self._read(file, 0).num_rows)]
            metadata = pq.read_metadata(file)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file}: cannot be read ({error})") from None
        numbers = range(metadata.num_row_groups)
        return [(file, group, metadata.row_group(group).num_rows) for group in numbers]

    def _read(self, file: str, group: int) -> pa.Table:
        if not file.endswith(".arrow"):
            with pq.ParquetFile(file) as table:
                return table.read_row_group(group, columns=self.columns, use_threads=False)
        with pa.memory_map(file) as source:
            try:
                table = pa.ipc.open_file(source).read_all()
            except pa.ArrowInvalid:  # Hugging Face's `datasets` write streams
                table = pa.ipc.open_stream(source).read_all()
        return table.select(self.columns) if self.columns is not None else table


def _files(path: str) -> list[str]:
    place = expand_home(path)
    if place.is_dir():
        files = [str(file) for suffix in SUFFIXES for file in place.rglob(f"*{suffix}")]
    else:
        files = glob(str(place), recursive=True)
    if not files:
        raise UserError(f"{path}: there is no {' or '.join(SUFFIXES)} file; name a file or folder")
    return sorted(str(Path(file).resolve()) for file in files)


def _value(cell: pa.Scalar) -> Any:
    """The Python value of a cell; lists become numpy arrays."""
    value = cell.as_py()
    return np.array(value) if isinstance(value, list) else value
