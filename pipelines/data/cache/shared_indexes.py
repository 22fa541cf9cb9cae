"""Indexes of data in the folder of a run: the driver makes them once, and the workers read them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from hashlib import sha256
from typing import BinaryIO, Literal, NamedTuple

from pydantic import BaseModel, Field, NonNegativeInt

from actors.storage.errors import FileChanged
from actors.storage.storage import open_storage
from pipelines.data.cache.local_copies import LocalCopies
from pipelines.errors import DataUnreachable

PACK_BYTES = 64 << 20
"""Indexes share files of about this size: a dataset may have 10,000 shards, a run 1,000 workers."""
SUFFIX = ".pack"
INDEX_FOLDER = "indexes"
"""Within the folder of a run's streams."""


class IndexEntry(NamedTuple):
    """The index of one file of a dataset, as a process has it."""

    shown: str
    identity: str
    """What determines the index: the place of the file, its size and its version."""
    content: Callable[[], bytes]
    digest: Callable[[], str]
    """Equal for equal indexes, also where their contents were written by other libraries."""


class IndexedFile(BaseModel):
    """Where the index of a file is."""

    identity: str
    digest: str
    pack: NonNegativeInt
    offset: NonNegativeInt
    num_bytes: NonNegativeInt


class Pack(BaseModel):
    """A file of indexes, named by the SHA-256 of its content."""

    checksum: str = Field(pattern="^[0-9a-f]{64}$")
    num_bytes: NonNegativeInt


class Catalogue(BaseModel):
    """The indexes of a dataset's files, in their order."""

    format: Literal[1] = 1
    packs: list[Pack] = []
    files: list[IndexedFile] = []

    @cached_property
    def by_identity(self) -> dict[str, IndexedFile]:
        return {file.identity: file for file in self.files}


class SharedIndexes:
    """The indexes that the datasets of this process use, by a name for each dataset.

    The process that starts a run publishes them before there are workers: first packs of indexes,
    then the catalogue of each dataset. If it dies between, the next one goes on with what its
    machine has kept. A storage that fails is reported: a machine can always make an index itself.
    """

    def __init__(self) -> None:
        self._url: str | None = None
        self._noted: dict[str, Sequence[IndexEntry]] = {}
        self._catalogues: dict[str, Catalogue | None] = {}

    def use(self, url: str | None) -> None:
        """From now on, look for indexes in this folder; None: in none."""
        self._url = url
        self._catalogues.clear()

    def note(self, dataset: str, entries: Sequence[IndexEntry]) -> None:
        """Note the indexes of all files of a dataset, in their order."""
        self._noted[dataset] = entries

    def find(self, dataset: str, identity: str, copies: LocalCopies) -> bytes | None:
        """The index, if the folder has it. This machine keeps a copy of its pack."""
        catalogue = self._catalogue(dataset)
        file = catalogue.by_identity.get(_digest(identity)) if catalogue else None
        if catalogue is None or file is None:
            return None
        try:
            pack = catalogue.packs[file.pack]
            fetch = partial(self._fetch, pack)
            made = copies.using_made(pack.checksum, pack.num_bytes, fetch)
            with made as path, path.open("rb") as packed:
                packed.seek(file.offset)
                return packed.read(file.num_bytes)
        except (OSError, IndexError) as error:
            self._catalogues[dataset] = None  # do not wait for the storage once for each file
            _report(f"no index can be read from the run's folder: {error}")
            return None

    def publish(self, url: str) -> None:
        """Write the noted indexes to a folder, as the process that starts a run does."""
        try:
            for dataset, entries in self._noted.items():
                _write(url, dataset, entries)
        except OSError as error:
            _report(f"the indexes of the data cannot be written to the run's folder: {error}")

    def refuse_other(self) -> None:
        """Raise `DataUnreachable` if this process has other data than the one that published."""
        for dataset, entries in self._noted.items():
            if (catalogue := self._catalogue(dataset)) is None:
                continue
            if len(entries) != len(catalogue.files):
                raise DataUnreachable(
                    f"{entries[0].shown}: the dataset has {len(entries)} files on this machine, "
                    f"but {len(catalogue.files)} where the run was started: make them equal"
                )
            for entry, file in zip(entries, catalogue.files, strict=True):
                if _digest(entry.identity) != file.identity and entry.digest() != file.digest:
                    raise DataUnreachable(
                        f"{entry.shown}: has other samples on this machine than where the run was "
                        "started: make them equal, or start the run again"
                    )

    def _catalogue(self, dataset: str) -> Catalogue | None:
        if self._url is None:
            return None
        if dataset not in self._catalogues:
            self._catalogues[dataset] = _read(self._url, dataset)
        return self._catalogues[dataset]

    def _fetch(self, pack: Pack, out: BinaryIO) -> None:
        assert self._url is not None
        content = open_storage(self._url).read(pack.checksum + SUFFIX)
        if sha256(content).hexdigest() != pack.checksum:
            raise FileChanged(f"{pack.checksum}{SUFFIX} is damaged")
        out.write(content)


INDEXES = SharedIndexes()
"""Those of this process."""


def digest_of(parts: Sequence[bytes | memoryview]) -> str:
    """One digest of several parts, which also depends on where each ends."""
    digest = sha256(repr([len(part) for part in parts]).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _write(url: str, dataset: str, entries: Sequence[IndexEntry]) -> None:
    storage, catalogue = open_storage(url), Catalogue()
    present = storage.files()
    for packed in _packed(entries):
        content = b"".join(index for _, index in packed)
        pack = Pack(checksum=sha256(content).hexdigest(), num_bytes=len(content))
        offset = 0
        for entry, index in packed:
            file = IndexedFile(
                identity=_digest(entry.identity),
                digest=entry.digest(),
                pack=len(catalogue.packs),
                offset=offset,
                num_bytes=len(index),
            )
            catalogue.files.append(file)
            offset += len(index)
        catalogue.packs.append(pack)
        if present.get(name := pack.checksum + SUFFIX) != pack.num_bytes:
            storage.write(name, content)
    storage.write(_name(dataset), catalogue.model_dump_json().encode())


def _packed(entries: Sequence[IndexEntry]) -> Iterator[list[tuple[IndexEntry, bytes]]]:
    """The entries and their contents, so many together as share a pack."""
    packed: list[tuple[IndexEntry, bytes]] = []
    size = 0
    for entry in entries:
        packed.append((entry, entry.content()))
        size += len(packed[-1][1])
        if size >= PACK_BYTES:
            yield packed
            packed, size = [], 0
    if packed:
        yield packed


def _read(url: str, dataset: str) -> Catalogue | None:
    try:
        return Catalogue.model_validate_json(open_storage(url).read(_name(dataset)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        _report(f"no index can be read from the run's folder: {first}")
        return None


def _name(dataset: str) -> str:
    return _digest(dataset) + ".json"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _report(line: str) -> None:
    print(f"elastic: {line}", file=sys.stderr, flush=True)
