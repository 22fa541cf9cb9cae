"""The index of a folder of prepared data: written last, so what has none is not there."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actors.storage import DiskStorage, Storage
from pipelines.errors import DataUnreachable, UserError

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


class Split(Record):
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
    splits: dict[str, Split]

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
