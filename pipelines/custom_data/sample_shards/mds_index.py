"""The index of a folder of MDS shards, and the place of a sample in one of them."""

from __future__ import annotations

import os
import struct
from pathlib import PurePosixPath
from typing import BinaryIO, Literal

import numpy as np
from pydantic import BaseModel, NonNegativeInt, ValidationError, field_validator, model_validator

from pipelines.errors import UserError

INDEX = "index.json"
WHAT_TO_DO = "fetch or write it again"


class MdsFile(BaseModel):
    """A file of a shard."""

    basename: str
    bytes: NonNegativeInt
    hashes: dict[str, str] = {}

    @field_validator("basename")
    @classmethod
    def _lies_in_the_folder(cls, name: str) -> str:
        if not name or name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name!r} lies outside of the folder")
        return name


class MdsShard(BaseModel):
    """What the index says of a shard."""

    version: Literal[2]
    format: Literal["mds"]
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    compression: str | None = None
    raw_data: MdsFile
    zip_data: MdsFile | None = None
    samples: NonNegativeInt

    @model_validator(mode="after")
    def _columns_match(self) -> MdsShard:
        if not len(self.column_names) == len(self.column_encodings) == len(self.column_sizes):
            raise ValueError("column_names, column_encodings and column_sizes differ in length")
        if self.compression and self.zip_data is None:
            raise ValueError("a compressed shard has no zip_data")
        return self

    @property
    def stored(self) -> MdsFile:
        """The file from which the shard comes, unless it lies here uncompressed."""
        return self.zip_data or self.raw_data

    def values(self, data: bytes) -> dict[str, bytes]:
        """The encoded values of a sample by column. Raises `ValueError` if it has another size."""
        begin = 4 * sum(not size for size in self.column_sizes)
        variable = iter(struct.unpack_from(f"<{begin // 4}I", data) if len(data) >= begin else ())
        values = {}
        for name, size in zip(self.column_names, self.column_sizes, strict=True):
            end = begin + (size or next(variable, len(data)))
            values[name] = data[begin:end]
            begin = end
        if begin != len(data):
            raise ValueError(f"it has {len(data)} bytes, but its columns {begin}")
        return values


class MdsIndex(BaseModel):
    """`index.json`."""

    version: Literal[2]
    shards: list[MdsShard]


def parse_index(content: bytes, shown: str) -> list[MdsShard]:
    """The shards of an index. Raises `UserError`, whose message begins with `shown`."""
    try:
        shards = MdsIndex.model_validate_json(content).shards
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{shown}: not an index of MDS shards ({place}: {first['msg']}); {WHAT_TO_DO}"
        ) from None
    if not any(shard.samples for shard in shards):
        raise UserError(f"{shown}: has no samples")
    return shards


def sample_in(file: BinaryIO, sample: int, shard: MdsShard) -> bytes:
    """The content of a sample of an uncompressed shard. Raises `ValueError` if the shard is not the
    one of the index or is damaged."""
    size = os.fstat(file.fileno()).st_size
    if size != shard.raw_data.bytes:
        raise ValueError(f"it has {size} bytes, {shard.raw_data.bytes} in {INDEX}")
    num_samples = int(np.frombuffer(file.read(4), "<u4")[0]) if size >= 4 else 0
    if num_samples != shard.samples:
        raise ValueError(f"it has {num_samples} samples, {shard.samples} in {INDEX}")
    file.seek(4 * (1 + sample))
    begin, end = np.frombuffer(file.read(8), "<u4").tolist()
    if not 4 * (2 + num_samples) <= begin <= end <= size:
        raise ValueError(f"sample {sample} lies at bytes {begin} to {end} of {size}")
    file.seek(begin)
    return file.read(end - begin)
