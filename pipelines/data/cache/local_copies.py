"""Copies of whole files at URLs, and files made from others, in the cache of the machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from actors.storage.remote_files import RemoteFile
from actors.storage.storage import retry
from pipelines.data.cache.shard_cache import CacheKey, HeldFile, ShardCache
from pipelines.settings import CacheSettings
from pipelines.settings.home import expand_home

BUSY_S = 0.05
"""The pause while another process fetches the same file."""


def cache_folder(settings: CacheSettings) -> Path:
    """The folder of the machine's cache."""
    if settings.folder is not None:
        return expand_home(settings.folder)
    return Path(tempfile.gettempdir()) / f"elastic-cache-{os.getuid()}"


class LocalCopies:
    """Whole files at URLs, each copied once to the machine's cache, where it is in use while this
    object exists. The copy belongs to the file's URL, size and version."""

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._held: dict[RemoteFile, HeldFile] = {}

    def path_of(self, file: RemoteFile) -> Path:
        """The copy, which this call makes if there is none.

        Raises `OSError` if the file cannot be read or the cache has no room for it.
        """
        if file not in self._held:
            self._held[file] = self._hold(file)
        return self._held[file].path

    def release(self, file: RemoteFile) -> None:
        """Allow the cache to evict the copy; a process may have few files open at once."""
        if (held := self._held.pop(file, None)) is not None:
            held.release()

    @contextmanager
    def using(self, file: RemoteFile) -> Iterator[Path]:
        """The copy, which the cache may evict afterwards. Raises as `path_of`."""
        with self._until_released(self._hold(file)) as path:
            yield path

    @contextmanager
    def using_made(
        self, identity: str, num_bytes: int, write: Callable[[BinaryIO], None]
    ) -> Iterator[Path]:
        """A file that `write` makes once on this machine, of what `identity` determines. The cache
        may evict it afterwards. Raises `OSError` as `path_of`, and what `write` raises."""
        with self._until_released(self._hold_made(identity, num_bytes, write)) as path:
            yield path

    def find(self, identity: str) -> bytes | None:
        """What has been kept under this identity. Raises `OSError`."""
        held = self._cache().hold(CacheKey(_digest(identity), None))
        if held is None:
            return None
        with self._until_released(held) as path:
            return path.read_bytes()

    def keep(self, identity: str, content: bytes) -> None:
        """Keep a file in the cache, if it has room. Raises `OSError`."""
        cache, key = self._cache(), CacheKey(_digest(identity), len(content))
        while cache.fill(key, partial(_write_bytes, content)) == "busy":
            time.sleep(BUSY_S)

    @contextmanager
    def _until_released(self, held: HeldFile) -> Iterator[Path]:
        try:
            yield held.path
        finally:
            held.release()

    def _hold(self, file: RemoteFile) -> HeldFile:
        identity = f"{file.url} {file.num_bytes} {file.version}"
        return self._hold_made(identity, file.num_bytes, partial(write_file, file))

    def _hold_made(
        self, identity: str, num_bytes: int, write: Callable[[BinaryIO], None]
    ) -> HeldFile:
        key = CacheKey(_digest(identity), num_bytes)
        cache = self._cache()
        while (held := cache.hold(key)) is None:
            outcome = retry(partial(cache.fill, key, write), self._settings.patience_s)
            if outcome == "full":
                raise OSError(
                    f"{cache.folder}: no room for {num_bytes} bytes, as all files there are "
                    "in use; raise cache.max_bytes"
                )
            if outcome == "busy":
                time.sleep(BUSY_S)
        return held

    def _cache(self) -> ShardCache:
        return ShardCache(cache_folder(self._settings), self._settings.max_bytes)


def write_file(file: RemoteFile, out: BinaryIO) -> None:
    """Write a file's content from the begin, also if an attempt before has broken off."""
    out.seek(0)
    out.writelines(file.chunks())


def _write_bytes(content: bytes, out: BinaryIO) -> None:
    out.write(content)


def _digest(identity: str) -> str:
    return sha256(identity.encode()).hexdigest()
