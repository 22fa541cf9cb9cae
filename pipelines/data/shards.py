"""Token shards of prepared data: the index that lists them, and their memory-mapped Arrow files."""

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
from pipelines.errors import DataUnreachable, UserError

FORMAT = "elastic-tokens/1"
INDEX = "index.json"
LOCK = "prepare.lock"
SPLITS = ("train", "held_out")


class IndexRecord(BaseModel):
    """A frozen record of the index that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardFile(IndexRecord):
    """One Arrow file of a column.

    `sha256` covers all values from the column's first up to this file's last. So the digest of a
    column's last file does not depend on how the column was divided into files. `checksum` is the
    SHA-256 of the file itself and `first` the value of its first row; with them a single file can
    be verified and located. Data that an older version prepared have neither.
    """

    name: str
    num_bytes: int
    num_rows: int
    sha256: str
    checksum: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    first: int | None = None


class DataSplit(IndexRecord):
    """One split: a stream of tokens, and the position in it where each document starts."""

    num_tokens: int
    num_documents: int
    tokens: tuple[ShardFile, ...]
    starts: tuple[ShardFile, ...]


class Index(IndexRecord):
    """The contents of a folder of prepared data, and the inputs that it was made from."""

    format: str
    source: str
    input: str
    """Digest of the inputs: corpus fingerprint, tokenizer, held-out fraction."""
    tokenizer: str
    vocab_size: int
    separator: int
    dtype: Literal["uint16", "uint32"]
    held_out_fraction: float
    splits: dict[str, DataSplit]

    @property
    def digest(self) -> str:
        """Identifies the tokens and documents, independent of their source and shard files."""
        ends = {
            name: [files[-1].sha256 if files else "" for files in (split.tokens, split.starts)]
            for name, split in sorted(self.splits.items())
        }
        identity = [FORMAT, self.tokenizer, self.vocab_size, self.separator, ends]
        return sha256(json.dumps(identity).encode()).hexdigest()


def is_prepared(folder: Path) -> bool:
    """Whether a folder is one of prepared data, finished or not."""
    return (folder / LOCK).is_file()


def write_index(storage: Storage, index: Index) -> None:
    """Write the index durably and atomically, which makes the prepared data visible."""
    fields = index.model_dump() | {"digest": index.digest}
    storage.write(INDEX, (json.dumps(fields, indent=1) + "\n").encode())


def read_index(place: Path | Storage) -> Index:
    """The index of a folder of prepared data.

    Raises `UserError` if the folder's index is damaged or of another format, `DataUnreachable` if
    there is none, and `OSError` if the object store of a remote folder does not answer.
    """
    storage = DiskStorage(place) if isinstance(place, Path) else place
    file = storage.at(INDEX).url
    fields = read_json(storage)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise UserError(f"{file}: not an index of prepared data ({FORMAT}); prepare the data again")
    digest = fields.pop("digest", None)
    try:
        index = Index.model_validate(fields)
    except ValidationError as error:
        raise damaged(file) from error
    if index.digest != digest or set(index.splits) != set(SPLITS):
        raise damaged(file)
    return index


def read_json(storage: Storage) -> object:
    """The JSON value of the index file; raises like `read_index`."""
    file = storage.at(INDEX).url
    try:
        return json.loads(storage.read(INDEX))
    except OSError as error:
        if not isinstance(storage, DiskStorage) and not isinstance(error, FileNotFoundError):
            raise
        why = error.strerror or "there is no such file"
        raise DataUnreachable(
            f"{file}: cannot be read ({why}); prepare the data in a place that every machine sees"
        ) from error
    except ValueError as error:
        raise damaged(file) from error


def damaged(file: str | Path) -> UserError:
    """The error for a damaged file of prepared data."""
    return UserError(f"{file}: is damaged; delete its folder and prepare the data again")


class OpenShard:
    """The rows of one file; `chunks` are read-only memory-mapped views, one a record batch."""

    def __init__(self, chunks: list[np.ndarray]) -> None:
        self.chunks = [chunk for chunk in chunks if len(chunk)]
        self._firsts: list[int] = []
        self.num_rows = 0
        for chunk in self.chunks:
            self._firsts.append(self.num_rows)
            self.num_rows += len(chunk)

    def read_into(self, first: int, out: np.ndarray) -> int:
        """Copy rows from `first` on until the file or `out` ends; returns the number of rows."""
        num_done, place = 0, bisect_right(self._firsts, first) - 1
        while num_done < len(out) and place < len(self.chunks):
            offset = first + num_done - self._firsts[place]
            piece = self.chunks[place][offset : offset + len(out) - num_done]
            out[num_done : num_done + len(piece)] = piece
            num_done += len(piece)
            place += 1
        return num_done

    def count_up_to(self, value: int) -> int:
        """The number of rows that are at most `value`; rows must ascend."""
        place = bisect_right(self.chunks, value, key=lambda chunk: int(chunk[0])) - 1
        if place < 0:
            return 0
        return self._firsts[place] + int(self.chunks[place].searchsorted(value, side="right"))


class Shards(Protocol):
    """The files of a folder of prepared data, by name; the folder is local or at a URL."""

    def add(self, file: ShardFile, schema: pa.Schema) -> None:
        """Register a file of a column with this schema. Raises `UserError` if it is visibly not
        that file."""

    def opened(self, name: str) -> OpenShard:
        """A registered file, opened. Raises `UserError` if it is not the file of the index."""

    def place_of(self, name: str) -> str:
        """The path or URL of a file, for messages."""


class FolderShards:
    """The files of a folder on this machine, each opened when it is added and never closed."""

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
    """Map one file. Raises `UserError`, naming the file, if it differs from the index."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != file.num_bytes:
            raise UserError(
                f"{path}: has {num_bytes} bytes, not {file.num_bytes}: truncated or replaced; "
                f"delete {path.parent} and prepare the data again"
            )
        # The views keep the mapping open, not the file: many shards must not use up descriptors.
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
    """The values of a record batch of one column, without a copy."""
    batch.validate()
    values: np.ndarray = batch.column(0).to_numpy(zero_copy_only=True)
    return values
