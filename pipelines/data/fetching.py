"""Remote shards, prefetched by background threads from an object store into the machine's cache."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import BinaryIO

import pyarrow as pa

from actors.storage.credentials import without_credentials
from actors.storage.storage import LONGEST_RETRY_S, RETRY_S, Storage, retry
from elastic.protocol.policy import backoff_s
from pipelines.data.cache import CacheKey, HeldFile, ShardCache, cache_folder
from pipelines.data.shards import OpenShard, ShardFile, damaged, open_shard
from pipelines.errors import DataUnreachable, UserError
from pipelines.settings import CacheSettings

READ_BYTES = 1 << 23
CACHE_RETRY_S = 0.05
"""The pause while another process fetches the same file, or every cached file is in use."""
IDLE_S = 1.0
"""A mapped file that was not read for this long counts as unused."""
POLL_S = 0.05
MAX_OPEN = 64
PREFETCH_DIVISOR = 16
"""Prefetched files of one worker may take this fraction (1/16) of the cache."""


def nothing() -> None:
    """An interrupt that never raises."""


def unreachable(url: str, error: OSError) -> DataUnreachable:
    """The error for data at a URL that cannot be read."""
    cause = without_credentials(str(error).splitlines()[0])
    return DataUnreachable(
        f"{without_credentials(url)}: the data cannot be read ({cause}); check this machine's "
        "network and the credentials in its environment"
    )


@dataclass
class FetchFailure:
    """The failed attempts to fetch a file: the last cause, and the time of the first."""

    cause: OSError
    since: float
    num_failures: int = 0


@dataclass
class MappedFile:
    """A mapped file of the cache."""

    shard: OpenShard
    held: HeldFile
    used_at: float


@dataclass
class Queue:
    """Files to fetch: those that a reader waits for first, then those to prefetch, in order of use.

    Prefetched files that are not read yet may take `max_ahead_bytes`. More would evict, as least
    recently used, the files that are to be read next.
    """

    max_ahead_bytes: int
    needed: list[str] = field(default_factory=list)
    ahead: dict[str, int] = field(default_factory=dict)
    """Files to prefetch, and their sizes."""
    unread: dict[str, int] = field(default_factory=dict)
    """Files prefetched but not read yet, in that order, and their sizes."""
    under_way: set[str] = field(default_factory=set)
    not_before: dict[str, float] = field(default_factory=dict)

    def take(self, now: float, local: Container[str]) -> str | None:
        """The next file to fetch: not in `local`, and not taken by another thread."""
        has_room = sum(self.unread.values()) < self.max_ahead_bytes
        for name in (*self.needed, *(self.ahead if has_room else {})):
            is_free = name not in local and name not in self.under_way
            if is_free and self.not_before.get(name, 0.0) <= now:
                self.under_way.add(name)
                return name
        return None

    def mark_fetched(self, name: str) -> None:
        if name in self.ahead:
            self.unread[name] = self.ahead.pop(name)

    def mark_read(self, name: str) -> None:
        """Remove a file, and those prefetched before it, from the unread ones.

        Files are read in order, so those before it have been read or are no longer needed.
        """
        names = list(self.unread)
        for other in names[: names.index(name) + 1] if name in self.unread else names:
            del self.unread[other]


class FetchedShards:
    """The files of a folder of prepared data in an object store; see `pipelines.data.shards`.

    It fetches nothing and starts no thread before a file is requested.
    """

    def __init__(self, storage: Storage, settings: CacheSettings) -> None:
        self._storage = storage
        self._settings = settings
        self._files: dict[str, tuple[ShardFile, pa.Schema]] = {}
        self._cache: ShardCache | None = None
        self._changed = threading.Condition()
        self._queue = Queue(settings.max_bytes // PREFETCH_DIVISOR)
        self._open: dict[str, MappedFile] = {}
        self._failures: dict[str, FetchFailure] = {}
        self._fatal: dict[str, Exception] = {}
        """Errors that no retry fixes, by file."""
        self._mismatched: set[str] = set()
        """Files that arrived once with a wrong checksum."""
        self._verified: dict[str, int] = {}
        """The inode of each cached file that this process has verified."""
        self._num_threads = 0

    def add(self, file: ShardFile, schema: pa.Schema) -> None:
        if not file.checksum or file.first is None:
            raise UserError(
                f"{self.place_of(file.name)}: the index has no checksum of it (an older version "
                "prepared it); prepare the data again"
            )
        if file.num_bytes > self._settings.max_bytes:
            raise UserError(
                f"cache.max_bytes={self._settings.max_bytes} is too small: "
                f"{self.place_of(file.name)} has {file.num_bytes} bytes; allow more"
            )
        self._files[file.name] = (file, schema)

    def place_of(self, name: str) -> str:
        return without_credentials(self._storage.at(name).url)

    def reach(self) -> None:
        """Raise `DataUnreachable` if this machine cannot use its cache or cannot read the data."""
        folder = cache_folder(self._settings)
        try:
            self._cache = ShardCache(folder, self._settings.max_bytes)
        except OSError as error:
            raise DataUnreachable(
                f"cache.folder={folder}: cannot be used ({error.strerror}); name a writable folder "
                "on a local disk of each machine"
            ) from None
        name = next(iter(self._files))
        try:
            num_bytes = retry(partial(self._storage.size, name), self._settings.reach_timeout_s)
        except OSError as error:
            raise unreachable(self._storage.at(name).url, error) from None
        if num_bytes != self._files[name][0].num_bytes:
            raise damaged(self.place_of(name))

    def prefetch(self, names: Iterable[str]) -> None:
        """Queue these files to be fetched in this order; returns at once."""
        with self._changed:
            self._start()
            for name in names:
                if name not in self._open:
                    self._queue.ahead[name] = self._files[name][0].num_bytes
            self._changed.notify_all()

    def opened(self, name: str, interrupt: Callable[[], None] = nothing) -> OpenShard:
        """A file, fetched if need be; the wait calls `interrupt`, which may raise.

        Raises `DataUnreachable` if the store has failed for `patience_s`.
        """
        began = time.monotonic()
        with self._requested(name):
            while True:
                with self._changed:
                    mapped = self._open.get(name)
                    if mapped is not None:
                        mapped.used_at = time.monotonic()
                        return mapped.shard
                    self._changed.notify_all()
                    self._changed.wait(POLL_S)
                    self._raise_failure(name, began)
                interrupt()

    @contextmanager
    def _requested(self, name: str) -> Iterator[None]:
        with self._changed:
            self._start()
            if name not in self._open:
                self._queue.not_before.pop(name, None)
                self._queue.mark_read(name)
            self._queue.needed.append(name)
        try:
            yield
        finally:
            with self._changed:
                self._queue.needed.remove(name)

    def _raise_failure(self, name: str, began: float) -> None:
        if name in self._fatal:
            raise self._fatal[name]
        failure = self._failures.get(name)
        patience_s = self._settings.patience_s
        if failure and time.monotonic() - max(began, failure.since) > patience_s:
            raise unreachable(self._storage.at(name).url, failure.cause)

    def _start(self) -> None:
        if self._cache is None:
            self.reach()
        while self._num_threads < self._settings.num_fetchers:
            self._num_threads += 1
            threading.Thread(target=self._serve, name="fetcher", daemon=True).start()

    def _opened_cache(self) -> ShardCache:
        assert self._cache is not None, "`_start` opens the cache before it starts a thread"
        return self._cache

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._release_idle(IDLE_S)
                name = self._queue.take(time.monotonic(), self._open)
                if name is None:
                    is_pending = self._queue.needed or self._queue.ahead
                    self._changed.wait(POLL_S if is_pending else IDLE_S)
                    continue
            self._fetch_or_map(name)
            with self._changed:
                self._queue.under_way.discard(name)
                self._changed.notify_all()

    def _fetch_or_map(self, name: str) -> None:
        """Try once to get a file into the cache, and to map it if a reader waits for it."""
        pause_s = 0.0
        try:
            is_done = self._take_from_cache(name)
            if not is_done:
                pause_s = self._fetch(name)
            self._note_success(name)
        except OSError as error:
            is_done, pause_s = False, self._note_failure(name, error)
        except Exception as error:  # `opened` raises it to the reader
            self._fatal[name] = error
            is_done = True  # a retry would not help
        with self._changed:
            if is_done:
                self._queue.mark_fetched(name)
            else:
                self._queue.not_before[name] = time.monotonic() + pause_s

    def _take_from_cache(self, name: str) -> bool:
        file, schema = self._files[name]
        key = CacheKey(file.checksum, file.num_bytes)
        cache = self._opened_cache()
        held = cache.hold(key)
        if held is None:
            return False
        inode = held.inode()
        if self._verified.get(name) != inode and not held.is_intact(key):
            cache.discard(held)
            held.release()
            _report(f"{held.path}: is damaged; fetching it again from {self.place_of(name)}")
            return False
        self._verified[name] = inode
        with self._changed:
            if name not in self._queue.needed or name in self._open:
                held.release()
                return True
            self._open[name] = MappedFile(
                open_shard(held.path, file, schema), held, time.monotonic()
            )
            if len(self._open) > MAX_OPEN:
                self._release(min(self._open, key=lambda other: self._open[other].used_at))
        return True

    def _fetch(self, name: str) -> float:
        """Fetch a file into the cache; returns the seconds to wait before the next look at it."""
        file, _ = self._files[name]
        key = CacheKey(file.checksum, file.num_bytes)
        filled = self._opened_cache().fill(key, partial(self._download, file))
        if filled == "filled":
            return 0.0
        if filled == "full":
            with self._changed:
                if self._queue.needed:
                    self._release_idle(0.0)
        return CACHE_RETRY_S

    def _download(self, file: ShardFile, out: BinaryIO) -> None:
        digest, num_bytes = sha256(), 0
        while num_bytes < file.num_bytes:
            data = self._read(file.name, num_bytes)
            if not data:
                break
            out.write(data)
            digest.update(data)
            num_bytes += len(data)
        if digest.hexdigest() == file.checksum:
            self._verified[file.name] = os.fstat(out.fileno()).st_ino
        elif file.name in self._mismatched:
            raise damaged(self.place_of(file.name))
        else:
            self._mismatched.add(file.name)
            raise OSError("the fetched file does not have the checksum in the index")

    def _read(self, name: str, offset: int) -> bytes:
        try:
            return self._storage.read(name, offset, READ_BYTES)
        except FileNotFoundError:
            raise UserError(
                f"{self.place_of(name)}: does not exist any more; prepare the data again"
            ) from None

    def _release_idle(self, idle_s: float) -> None:
        """Release the files that were not read for `idle_s`."""
        latest = time.monotonic() - idle_s
        for name in [name for name, mapped in self._open.items() if mapped.used_at <= latest]:
            self._release(name)

    def _release(self, name: str) -> None:
        """Let the cache evict a file. Readers that have mapped it can still read it."""
        self._open.pop(name).held.release()

    def _note_success(self, name: str) -> None:
        with self._changed:
            if self._failures.pop(name, None) and not self._failures:
                _report(f"{self.place_of(name)}: the data can be read again")

    def _note_failure(self, name: str, error: OSError) -> float:
        with self._changed:
            if not self._failures:
                _report(f"{unreachable(self._storage.at(name).url, error)}; trying again")
            now = time.monotonic()
            failure = self._failures.setdefault(name, FetchFailure(error, now))
            failure.cause = error
            failure.num_failures += 1
        return backoff_s(RETRY_S, failure.num_failures, LONGEST_RETRY_S)


def _report(line: str) -> None:
    print(f"elastic: {line}", file=sys.stderr, flush=True)
