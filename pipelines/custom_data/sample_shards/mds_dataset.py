"""A map-style dataset of the samples of MDS shards, as MosaicML Streaming writes them."""

from __future__ import annotations

import hashlib
import zlib
from bz2 import BZ2Decompressor
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from actors.storage.credentials import without_credentials
from actors.storage.remote_files import remote_files
from actors.storage.storage import is_remote, retry
from pipelines.custom_data.sample_shards.field_decoders import undecodable
from pipelines.custom_data.sample_shards.mds_encodings import PICKLE, Decode, decoder_of
from pipelines.custom_data.sample_shards.mds_index import (
    INDEX,
    WHAT_TO_DO,
    MdsFile,
    MdsShard,
    parse_index,
    sample_in,
)
from pipelines.data.cache import LocalCopies
from pipelines.data.cache.shared_indexes import INDEXES, IndexEntry, digest_of
from pipelines.data.source_files import SourceFile, listed_files
from pipelines.errors import DataUnreachable, UserError
from pipelines.reading.concatenated import Concatenated
from pipelines.settings import CacheSettings
from pipelines.settings.home import expand_home

HASHES = {name for name in hashlib.algorithms_guaranteed if not name.startswith("shake")}
ARROW_CODECS = {"zstd": "zstd", "br": "brotli", "snappy": "snappy"}


class MdsDataset(Concatenated):
    """Samples as dicts by column, in the order of the shards and of the samples in them.

    `folder` is a folder with `index.json`, also at a URL; of a split, name its subfolder.
    `columns` are the columns to read (None: all). `transform` is called with each sample. Pickled
    columns are refused unless `allow_pickle`.

    Shards at a URL and compressed ones are kept uncompressed in the cache of the machine, whose
    settings are `cache`. They are compared with their hashes in the index, if hashlib knows these.
    """

    opened = ("_copies", "_remote", "_decoders", "shards", "_ends")

    def __init__(
        self,
        folder: str | Path,
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        allow_pickle: bool = False,
        cache: CacheSettings | None = None,
    ) -> None:
        """Raises `UserError` if the index cannot be read or has what cannot be decoded."""
        self.folder = str(folder).removeprefix("file://").rstrip("/")
        self.columns = list(columns) if columns is not None else None
        self.transform = transform
        self.cache = cache or CacheSettings()
        self._allow_pickle = allow_pickle
        self._index = self._read_index()
        self._open()

    def __getitem__(self, index: int) -> Any:
        """Raises `UserError` for a damaged shard, `DataUnreachable` for one out of reach."""
        number, from_end = self._located(index)
        shard = self.shards[number]
        row = from_end + shard.samples
        shown = self._place(shard.raw_data)
        with self._local(number) as path, path.open("rb") as file:
            try:
                values = shard.values(sample_in(file, row, shard))
            except ValueError as error:
                raise UserError(f"{shown}: is damaged ({error}); {WHAT_TO_DO}") from None
        sample = {}
        for name, decode in self._decoders[number].items():
            try:
                sample[name] = decode(values[name])
            except Exception as error:  # whatever a format raises for damaged content
                raise undecodable(f"{shown}, sample {row}, column {name!r}", error) from error
        return sample if self.transform is None else self.transform(sample)

    def _open(self) -> None:
        shown = f"{without_credentials(self.folder)}/{INDEX}"
        self.shards = parse_index(self._index, shown)
        self._ends = list(accumulate(shard.samples for shard in self.shards))
        self._decoders = [self._decoders_of(shard, shown) for shard in self.shards]
        self._copies = LocalCopies(self.cache)
        self._remote = lru_cache(None)(self._listed)
        digest = partial(digest_of, [self._index])
        entry = IndexEntry(shown, digest(), lambda: b"", digest)  # each process reads it itself
        INDEXES.note(f"MDS {self.folder}", [entry])

    def _read_index(self) -> bytes:
        shown = f"{without_credentials(self.folder)}/{INDEX}"
        try:
            if not is_remote(self.folder):
                return (expand_home(self.folder) / INDEX).read_bytes()
            for file in listed_files(f"{self.folder}/{INDEX}", shown):
                return file.read_bytes()
            raise FileNotFoundError("there is none")
        except OSError as error:
            cause = without_credentials(error.strerror or str(error).splitlines()[0])
            raise UserError(
                f"{shown}: cannot be read ({cause}); name a folder of MDS shards, such as the "
                "subfolder of a split"
            ) from None

    def _decoders_of(self, shard: MdsShard, shown: str) -> dict[str, Decode]:
        """The decoders of the chosen columns."""
        encodings = dict(zip(shard.column_names, shard.column_encodings, strict=True))
        decoders = {}
        for name in encodings if self.columns is None else self.columns:
            if name not in encodings:
                raise UserError(
                    f"{shown}: has no column {name!r}, only {', '.join(encodings)}; name these"
                )
            decode = decoder_of(encodings[name], self._allow_pickle)
            if decode is None:
                raise _unreadable(name, encodings[name], shown)
            decoders[name] = decode
        return decoders

    @contextmanager
    def _local(self, number: int) -> Iterator[Path]:
        """The uncompressed shard."""
        shard = self.shards[number]
        raw = expand_home(self.folder) / shard.raw_data.basename
        try:
            if not is_remote(self.folder) and (raw.exists() or shard.zip_data is None):
                yield raw
                return
            source, identity = self._remote(number)
            write = partial(_write_raw, source, shard, self._place(shard.stored))
            with self._copies.using_made(identity, shard.raw_data.bytes, write) as path:
                yield path
        except OSError as error:
            cause = without_credentials(str(error).splitlines()[0])
            raise DataUnreachable(
                f"{self._place(shard.raw_data)}: cannot be read ({cause}); check this machine's "
                "disk, its network and the credentials in its environment"
            ) from None

    def _listed(self, number: int) -> tuple[SourceFile, str]:
        """The file from which a shard is made, and all that determines its content."""
        shard = self.shards[number]
        shown, name = self._place(shard.stored), shard.stored.basename
        facts = shard.model_dump_json()
        if not is_remote(self.folder):
            file = (expand_home(self.folder) / name).resolve()
            return file, f"mds {file} {file.stat().st_mtime_ns} {facts}"
        url = f"{self.folder}/{name}"
        if not (found := retry(lambda: remote_files(url), self.cache.patience_s)):
            raise UserError(f"{shown}: is not there, but {INDEX} names it; {WHAT_TO_DO}")
        return found[0], f"mds {found[0].url} {found[0].version} {facts}"

    def _place(self, file: MdsFile) -> str:
        return f"{without_credentials(self.folder)}/{file.basename}"


def _unreadable(column: str, encoding: str, shown: str) -> UserError:
    if encoding == PICKLE:
        return UserError(
            f"{shown}: the column {column!r} is a pickle, which can run any code: leave it out "
            "with columns=[...], or trust its author with allow_pickle=True"
        )
    return UserError(
        f"{shown}: the column {column!r} has the encoding {encoding!r}, which is not known here: "
        "leave it out with columns=[...], or write it as bytes"
    )


def _write_raw(source: SourceFile, shard: MdsShard, shown: str, out: BinaryIO) -> None:
    """Write the uncompressed shard. Raises `UserError` if it is damaged."""
    out.seek(0)
    content = source.read_bytes()
    _refuse_other(content, shard.stored, shown)
    if shard.zip_data is not None:
        content = _decompressed(content, shard, shown)
        _refuse_other(content, shard.raw_data, shown)
    out.write(content)


def _refuse_other(content: bytes, file: MdsFile, shown: str) -> None:
    if len(content) != file.bytes:
        raise UserError(f"{shown}: has {len(content)} bytes, {file.bytes} in {INDEX}; {WHAT_TO_DO}")
    for name, expected in file.hashes.items():
        if name in HASHES and hashlib.new(name, content).hexdigest() != expected:
            raise UserError(f"{shown}: its {name} is another than in {INDEX}; {WHAT_TO_DO}")


def _decompressed(content: bytes, shard: MdsShard, shown: str) -> bytes:
    """At most one byte more than the index says. Raises `UserError`."""
    kind, num_bytes = (shard.compression or "").partition(":")[0], shard.raw_data.bytes
    try:
        match kind:
            case "gz":
                return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(content, num_bytes + 1)
            case "bz2":
                return BZ2Decompressor().decompress(content, num_bytes + 1)
            case _ if kind in ARROW_CODECS:
                codec = pa.Codec(ARROW_CODECS[kind])
                return bytes(codec.decompress(content, num_bytes, asbytes=True))
    except (pa.ArrowException, OSError, ValueError, zlib.error) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{shown}: cannot be decompressed ({reason}); {WHAT_TO_DO}") from None
    raise UserError(f"{shown}: has the compression {kind!r}; write it as zstd or without")
