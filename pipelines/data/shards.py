"""Shards: the Arrow files of columns, mapped into memory; here those of a folder on a disk."""

from __future__ import annotations

import json
from bisect import bisect_right
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actors.storage.storage import DiskStorage, Storage
from pipelines.settings.errors import DataUnreachable, UserError

FORMAT = "elastic-tokens/1"

INDEX = "index.json"

LOCK = "prepare.lock"

SPLITS = ("train", "held_out")


class Record(BaseModel):
    """A frozen record of the index, without fields that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardFile(Record):
    """One Arrow file; `sha256` is of all values of the column from its first up to this file's
    last, so that the last file's does not depend on where the column was cut into files.

    `checksum` is the SHA-256 of the file itself, and `first` the value of its first row: with them
    a file is verified, and found to be the right one, alone. Data that were prepared before there
    were such fields have neither.
    """

    name: str
    num_bytes: int
    num_rows: int
    sha256: str
    checksum: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    first: int | None = None


class DataSplit(Record):
    """One split: a stream of tokens, and where in it each document starts."""

    num_tokens: int
    num_documents: int
    tokens: tuple[ShardFile, ...]
    starts: tuple[ShardFile, ...]


class Index(Record):
    """What a folder of prepared data holds, and what it was made of."""

    format: str
    source: str
    input: str
    """Digest of what was asked for: corpus fingerprint, tokenizer, held-out fraction."""
    tokenizer: str
    vocab_size: int
    separator: int
    dtype: Literal["uint16", "uint32"]
    held_out_fraction: float
    splits: dict[str, DataSplit]

    @property
    def digest(self) -> str:
        """Identifies the tokens and documents, whatever files they came from or lie in."""
        ends = {
            name: [files[-1].sha256 if files else "" for files in (split.tokens, split.starts)]
            for name, split in sorted(self.splits.items())
        }
        told = [FORMAT, self.tokenizer, self.vocab_size, self.separator, ends]
        return sha256(json.dumps(told).encode()).hexdigest()


def is_prepared(folder: Path) -> bool:
    """Whether a folder is one of prepared data, be it finished or half done."""
    return (folder / LOCK).is_file()


def write_index(there: Storage, index: Index) -> None:
    """Make prepared data visible, all at once and durably."""
    told = index.model_dump() | {"digest": index.digest}
    there.write(INDEX, (json.dumps(told, indent=1) + "\n").encode())


def read_index(there: Path | Storage) -> Index:
    """The index of a folder; raises `UserError` if it is one of something else, `DataUnreachable`
    if there is none on this machine.

    Of a folder elsewhere also `OSError`, if its store does not answer.
    """
    storage = DiskStorage(there) if isinstance(there, Path) else there
    file = storage.at(INDEX).url
    told = read_json(storage)
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise UserError(f"{file}: no index of prepared data ({FORMAT}); prepare the data again")
    digest = told.pop("digest", None)
    try:
        index = Index.model_validate(told)
    except ValidationError as error:
        raise damaged(file) from error
    if index.digest != digest or set(index.splits) != set(SPLITS):
        raise damaged(file)
    return index


def read_json(storage: Storage) -> object:
    file = storage.at(INDEX).url
    try:
        return json.loads(storage.read(INDEX))
    except OSError as error:
        if not isinstance(storage, DiskStorage) and not isinstance(error, FileNotFoundError):
            raise
        why = error.strerror or "there is no such file"
        raise DataUnreachable(
            f"{file}: cannot be read ({why}); prepare the data first, where every machine sees them"
        ) from error
    except ValueError as error:
        raise damaged(file) from error


def damaged(file: str | Path) -> UserError:
    return UserError(
        f"{file}: is damaged; delete the folder that it lies in and prepare the data again"
    )


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
