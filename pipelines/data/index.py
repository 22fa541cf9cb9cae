"""The index of a folder of prepared data: written last, so what has none is not there."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from actors.storage import DiskStorage
from pipelines.errors import UserError

FORMAT = "elastic-tokens/1"
INDEX = "index.json"
LOCK = "prepare.lock"
SPLITS = ("train", "held_out")


class Record(BaseModel):
    """A frozen record of the index, without fields that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardFile(Record):
    """One Arrow file; `sha256` is of all values of the column from its first up to this file's
    last, so that the last file's does not depend on where the column was cut into files."""

    name: str
    num_bytes: int
    num_rows: int
    sha256: str


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


def write_index(folder: Path, index: Index) -> None:
    """Make prepared data visible, all at once and durably."""
    told = index.model_dump() | {"digest": index.digest}
    DiskStorage(folder).write(INDEX, (json.dumps(told, indent=1) + "\n").encode())


def read_index(folder: Path) -> Index:
    """The index of a folder; raises `UserError` if there is none, or one of something else."""
    file = folder / INDEX
    told = read_json(file)
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


def read_json(file: Path) -> object:
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}); prepare the data first"
        ) from error
    except ValueError as error:
        raise damaged(file) from error


def damaged(file: Path) -> UserError:
    return UserError(f"{file}: is damaged; delete {file.parent} and prepare the data again")
