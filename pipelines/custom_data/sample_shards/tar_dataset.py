"""A map-style dataset of the samples of tar files, as WebDataset writes them."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from actors.storage.credentials import without_credentials
from actors.storage.remote_files import RemoteFile
from pipelines.custom_data.sample_shards.field_decoders import Decoder, FieldDecoders
from pipelines.custom_data.sample_shards.tar_index import FORMAT, TarIndex, index_tar
from pipelines.data.cache import LocalCopies
from pipelines.data.cache.shared_indexes import INDEXES, IndexEntry
from pipelines.data.source_files import Named, SourceFile, named_files, place_of, state_of
from pipelines.errors import DataUnreachable, UserError
from pipelines.reading.concatenated import Concatenated
from pipelines.settings import CacheSettings

SUFFIXES = (".tar",)
REPORTED_BYTES = 1 << 30
"""Indexing more than this takes so long that a line announces it."""


class TarDataset(Concatenated):
    """Samples as dicts by field, such as `{"__key__": "a/1", "jpg": <image>, "cls": 3}`.

    `paths` are files, folders or globs, also at URLs, with braces for numbers:
    `"s3://bucket/train-{000000..000099}.tar"`. The samples have the order of the files, and in a
    file that of its members. `fields` are the fields to read (None: all); each sample must have
    them. `decoders` replace or add to those by the names of fields, such as `{"jpg": bytes}`.
    `transform` is called with each sample. Pickled fields are refused unless `allow_pickle`.

    Each file is indexed once, where the run is started. The index is kept in the machine's cache,
    `cache`, with the copies of files at URLs, and in the folder of the run, for all workers. A copy
    that has been evicted is made again.
    """

    opened = ("_copies", "_indexes", "_ends")

    def __init__(
        self,
        paths: Named,
        fields: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        decoders: Mapping[str, Decoder] | None = None,
        allow_pickle: bool = False,
        cache: CacheSettings | None = None,
    ) -> None:
        """Raises `UserError` if there is no such file, or a file cannot be read or is damaged."""
        self.fields = list(fields) if fields is not None else None
        self.transform = transform
        self.cache = cache or CacheSettings()
        self.files = named_files(_without_commands(paths), SUFFIXES)
        self._name = f"{FORMAT} {paths}"
        self._decoders = FieldDecoders(decoders or {}, allow_pickle)
        self._states = [state_of(file) for file in self.files]
        self._open()

    def __getitem__(self, index: int) -> Any:
        """Raises `UserError` for a damaged field, `DataUnreachable` for a file out of reach."""
        number, from_end = self._located(index)
        tar = self._indexes[number]
        row = from_end + tar.num_samples
        key, shown = tar.key(row), str(self.files[number])
        sample: dict[str, Any] = {"__key__": key, "__url__": shown}
        for name, data in self._contents(number, row):
            sample[name] = self._decoders.decode(name, data, f"{shown}, sample {key!r}")
        return sample if self.transform is None else self.transform(sample)

    def _open(self) -> None:
        self._copies = LocalCopies(self.cache)
        self._indexes = self._all_indexed()
        INDEXES.note(
            self._name,
            [
                IndexEntry(str(file), self._identity(number), index.to_bytes, index.digest)
                for number, (file, index) in enumerate(zip(self.files, self._indexes, strict=True))
            ],
        )
        self._ends = list(accumulate(index.num_samples for index in self._indexes))
        if not self._ends[-1]:
            raise UserError(f"{self.files[0]}: has no samples, which are files such as 'a.jpg'")
        self._refuse_unreadable()

    def _contents(self, number: int, row: int) -> Iterator[tuple[str, bytes]]:
        file = self.files[number]
        with self._local(file) as path, path.open("rb") as tar:
            if not isinstance(file, RemoteFile) and _state_of(tar.fileno()) != self._states[number]:
                raise UserError(f"{file}: has changed since the run opened it; start the run again")
            for name, offset, size in self._indexes[number].fields(row):
                if self.fields is None or name in self.fields:
                    tar.seek(offset)
                    yield name, tar.read(size)

    @contextmanager
    def _local(self, file: SourceFile) -> Iterator[Path]:
        try:
            if isinstance(file, RemoteFile):
                with self._copies.using(file) as path:
                    yield path
            else:
                yield file
        except OSError as error:
            cause = without_credentials(str(error).splitlines()[0])
            raise DataUnreachable(
                f"{file}: cannot be read ({cause}); check this machine's disk, its network and the "
                "credentials in its environment"
            ) from None

    def _all_indexed(self) -> list[TarIndex]:
        found = [self._kept_index(number) for number in range(len(self.files))]
        missing = [number for number, index in enumerate(found) if index is None]
        num_bytes = sum(_size(self.files[number]) for number in missing)
        if num_bytes > REPORTED_BYTES:
            _report(
                f"indexing {len(missing)} tar files, {num_bytes / 1e9:.1f} GB, for the first time"
            )
        with ThreadPoolExecutor(self.cache.num_fetchers) as pool:
            made = dict(zip(missing, pool.map(self._made_index, missing), strict=True))
        return [index if index is not None else made[n] for n, index in enumerate(found)]

    def _kept_index(self, number: int) -> TarIndex | None:
        identity = self._identity(number)
        try:
            if (content := self._copies.find(identity)) is not None:
                return TarIndex.from_bytes(content)
            if (content := INDEXES.find(self._name, identity, self._copies)) is not None:
                return TarIndex.from_bytes(content)
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            _report(
                f"{self.files[number]}: its kept index cannot be read ({error}): making it again"
            )
        return None

    def _made_index(self, number: int) -> TarIndex:
        file = self.files[number]
        with self._local(file) as path:
            index = index_tar(path, str(file))
        self._keep(number, index.to_bytes())
        return index

    def _keep(self, number: int, content: bytes) -> None:
        try:
            self._copies.keep(self._identity(number), content)
        except OSError as error:  # the next process makes it again
            _report(f"{self.files[number]}: its index cannot be kept in the cache: {error}")

    def _identity(self, number: int) -> str:
        return f"{FORMAT} {place_of(self.files[number])} {self._states[number]}"

    def _refuse_unreadable(self) -> None:
        for file, index in zip(self.files, self._indexes, strict=True):
            names = index.names if self.fields is None else self.fields
            self._decoders.refuse_unsafe(names, str(file))
            for name in self.fields or ():
                if (sample := index.sample_without(name)) is not None:
                    raise UserError(
                        f"{file}: sample {index.key(sample)!r} has no field {name!r}, only "
                        f"{', '.join(field for field, _, _ in index.fields(sample))}"
                    )


def _without_commands(paths: Named) -> Named:
    for path in [paths] if isinstance(paths, str | Path) else paths:
        if str(path).startswith("pipe:") or "::" in str(path):
            raise UserError(
                f"{path}: names a command or several URLs in the way of WebDataset: give a list of "
                'the URLs themselves, such as ["s3://bucket/train-{000..099}.tar"]'
            )
    return paths


def _state_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


def _size(file: SourceFile) -> int:
    return file.num_bytes if isinstance(file, RemoteFile) else file.stat().st_size


def _report(line: str) -> None:
    print(f"elastic: {line}", file=sys.stderr, flush=True)
