"""Shards that lie elsewhere: fetched ahead of need into this machine's cache, by threads beside."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, TypeVar

import pyarrow as pa

from actors.storage.credentials import without_credentials
from actors.storage.storage import Storage
from elastic.protocol.policy import backoff_s
from pipelines.data.cache import HeldFile, ShardCache, Wanted
from pipelines.data.shards import OpenShard, ShardFile, damaged, open_shard
from pipelines.settings import CacheSettings
from pipelines.settings.errors import DataUnreachable, UserError
from pipelines.settings.home import expanded

READ_BYTES = 1 << 23
RETRY_S, LONGEST_RETRY_S = 0.5, 10.0
OTHERS_RETRY_S = 0.05
"""The pause while another process fetches the same, or all in the cache is in use."""
IDLE_S = 1.0
"""Whatever has not been read for so long is not in use any more."""
LOOK_EVERY_S = 0.05
MAX_OPEN = 64
AHEAD_SHARE = 16
"""One part in so many of the cache is for what one worker fetches ahead of need."""

T = TypeVar("T")


def nothing() -> None:
    """Nobody interrupts."""


def insist(try_it: Callable[[], T], patience_s: float) -> T:
    """Try again for so long as a store refuses. Raises its last `OSError`; what is not there is
    not waited for."""
    began, num_failures = time.monotonic(), 0
    while True:
        try:
            return try_it()
        except FileNotFoundError:
            raise
        except OSError:
            num_failures += 1
            pause_s = backoff_s(RETRY_S, num_failures, LONGEST_RETRY_S)
            if time.monotonic() + pause_s > began + patience_s:
                raise
            time.sleep(pause_s)


def unreachable(url: str, error: OSError) -> DataUnreachable:
    cause = without_credentials(str(error).splitlines()[0])
    return DataUnreachable(
        f"{without_credentials(url)}: the data cannot be read ({cause}); see that this machine has "
        "a way there, and the credentials in its environment"
    )


@dataclass
class Trouble:
    """A file that could not be fetched, and since when."""

    cause: OSError
    since: float
    num_failures: int = 0


@dataclass
class InUse:
    """A file of the cache that is mapped."""

    shard: OpenShard
    held: HeldFile
    used_at: float


@dataclass
class Queue:
    """What is wanted, soonest first; what somebody waits for comes before all else.

    What has come ahead of need may take `max_ahead_bytes`: more would drive out of the cache, as
    used least recently, what is to be read soonest.
    """

    max_ahead_bytes: int
    needed: list[str] = field(default_factory=list)
    ahead: dict[str, int] = field(default_factory=dict)
    """What is to come, and its size."""
    unread: dict[str, int] = field(default_factory=dict)
    """What has come ahead of need, in that order, and its size."""
    under_way: set[str] = field(default_factory=set)
    not_before: dict[str, float] = field(default_factory=dict)

    def take(self, now: float, near: Container[str]) -> str | None:
        """What to see to now: neither `near` nor seen to by another."""
        ahead = self.ahead if sum(self.unread.values()) < self.max_ahead_bytes else ()
        for name in (*self.needed, *ahead):
            is_free = name not in near and name not in self.under_way
            if is_free and self.not_before.get(name, 0.0) <= now:
                self.under_way.add(name)
                return name
        return None

    def has_come(self, name: str) -> None:
        if name in self.ahead:
            self.unread[name] = self.ahead.pop(name)

    def is_read(self, name: str) -> None:
        """Whatever came before it has been read too, or is not read any more."""
        names = list(self.unread)
        for other in names[: names.index(name) + 1] if name in self.unread else names:
            del self.unread[other]


class FetchedShards:
    """The files of a folder of prepared data in an object store; see `pipelines.data.shards`.

    Nothing is fetched, and no thread started, before a file is asked for.
    """

    def __init__(self, there: Storage, settings: CacheSettings) -> None:
        self._there = there
        self._settings = settings
        self._files: dict[str, tuple[ShardFile, pa.Schema]] = {}
        self._cache: ShardCache | None = None
        self._changed = threading.Condition()
        self._queue = Queue(settings.max_bytes // AHEAD_SHARE)
        self._open: dict[str, InUse] = {}
        self._trouble: dict[str, Trouble] = {}
        self._spoilt: dict[str, Exception] = {}
        self._suspected: set[str] = set()
        self._verified: dict[str, int] = {}
        """The file of the cache, by its number there, of which this process knows it is whole."""
        self._num_threads = 0

    def add(self, file: ShardFile, schema: pa.Schema) -> None:
        if not file.checksum or file.first is None:
            raise UserError(
                f"{self.place_of(file.name)}: the index has no checksum of it, since an older "
                "version has prepared it; prepare the data again"
            )
        if file.num_bytes > self._settings.max_bytes:
            raise UserError(
                f"cache.max_bytes={self._settings.max_bytes}: {self.place_of(file.name)} alone has "
                f"{file.num_bytes} bytes; allow more"
            )
        self._files[file.name] = (file, schema)

    def place_of(self, name: str) -> str:
        return without_credentials(self._there.at(name).url)

    def reach(self) -> None:
        """Raise `DataUnreachable` if this machine has no cache, or no way to the data."""
        folder = self._cache_folder()
        try:
            self._cache = ShardCache(folder, self._settings.max_bytes)
        except OSError as error:
            raise DataUnreachable(
                f"cache.folder={folder}: cannot be used ({error.strerror}); name a folder on a "
                "disk of each machine"
            ) from None
        name = next(iter(self._files))
        try:
            num_bytes = insist(partial(self._there.size, name), self._settings.reach_timeout_s)
        except OSError as error:
            raise unreachable(self._there.at(name).url, error) from None
        if num_bytes != self._files[name][0].num_bytes:
            raise damaged(self.place_of(name))

    def prefetch(self, names: Iterable[str]) -> None:
        """Fetch these soon, the first first; returns at once."""
        with self._changed:
            self._start()
            for name in names:
                if name not in self._open:
                    self._queue.ahead[name] = self._files[name][0].num_bytes
            self._changed.notify_all()

    def opened(self, name: str, interrupt: Callable[[], None] = nothing) -> OpenShard:
        """A file, fetched if need be; who waits for it calls `interrupt`, which may raise.

        Raises `DataUnreachable` when the store has refused for `patience_s`.
        """
        began = time.monotonic()
        with self._needing(name):
            while True:
                with self._changed:
                    in_use = self._open.get(name)
                    if in_use is not None:
                        in_use.used_at = time.monotonic()
                        return in_use.shard
                    self._changed.notify_all()
                    self._changed.wait(LOOK_EVERY_S)
                    self._give_up(name, began)
                interrupt()

    @contextmanager
    def _needing(self, name: str) -> Iterator[None]:
        with self._changed:
            self._start()
            if name not in self._open:
                self._queue.not_before.pop(name, None)
                self._queue.is_read(name)
            self._queue.needed.append(name)
        try:
            yield
        finally:
            with self._changed:
                self._queue.needed.remove(name)

    def _give_up(self, name: str, began: float) -> None:
        if name in self._spoilt:
            raise self._spoilt[name]
        trouble = self._trouble.get(name)
        patience_s = self._settings.patience_s
        if trouble and time.monotonic() - max(began, trouble.since) > patience_s:
            raise unreachable(self._there.at(name).url, trouble.cause)

    def _cache_folder(self) -> Path:
        if self._settings.folder is not None:
            return expanded(self._settings.folder)
        return Path(tempfile.gettempdir()) / f"elastic-cache-{os.getuid()}"

    def _start(self) -> None:
        if self._cache is None:
            self.reach()
        while self._num_threads < self._settings.num_fetchers:
            self._num_threads += 1
            threading.Thread(target=self._serve, name="fetcher", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._let_go(IDLE_S)
                name = self._queue.take(time.monotonic(), self._open)
                if name is None:
                    is_pending = self._queue.needed or self._queue.ahead
                    self._changed.wait(LOOK_EVERY_S if is_pending else IDLE_S)
                    continue
            self._bring(name)
            with self._changed:
                self._queue.under_way.discard(name)
                self._changed.notify_all()

    def _bring(self, name: str) -> None:
        """One try to have a file near, and open if somebody waits for it."""
        pause_s = 0.0
        try:
            is_near = self._take_from_cache(name)
            if not is_near:
                pause_s = self._fetch(name)
            self._note_success(name)
        except OSError as error:
            is_near, pause_s = False, self._note_failure(name, error)
        except Exception as error:  # raised where it is waited for
            self._spoilt[name] = error
            is_near = True  # as near as it will come
        with self._changed:
            if is_near:
                self._queue.has_come(name)
            else:
                self._queue.not_before[name] = time.monotonic() + pause_s

    def _take_from_cache(self, name: str) -> bool:
        file, schema = self._files[name]
        wanted = Wanted(file.checksum, file.num_bytes)
        held = self._cache.hold(wanted)
        if held is None:
            return False
        inode = held.inode()
        if self._verified.get(name) != inode and not held.is_what(wanted):
            self._cache.discard(held)
            held.let_go()
            _tell(f"{held.path}: was damaged, is fetched again from {self.place_of(name)}")
            return False
        self._verified[name] = inode
        with self._changed:
            if name not in self._queue.needed or name in self._open:
                held.let_go()
                return True
            self._open[name] = InUse(open_shard(held.path, file, schema), held, time.monotonic())
            if len(self._open) > MAX_OPEN:
                self._release(min(self._open, key=lambda one: self._open[one].used_at))
        return True

    def _fetch(self, name: str) -> float:
        """Fill the cache; after what time to look again, in seconds."""
        file, _ = self._files[name]
        wanted = Wanted(file.checksum, file.num_bytes)
        filled = self._cache.fill(wanted, partial(self._download, file))
        if filled == "filled":
            return 0.0
        if filled == "no room":
            with self._changed:
                if self._queue.needed:
                    self._let_go(0.0)
        return OTHERS_RETRY_S

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
        elif file.name in self._suspected:
            raise damaged(self.place_of(file.name))
        else:
            self._suspected.add(file.name)
            raise OSError("what has come is not what the index says")

    def _read(self, name: str, offset: int) -> bytes:
        try:
            return self._there.read(name, offset, READ_BYTES)
        except FileNotFoundError:
            raise UserError(
                f"{self.place_of(name)}: is not there any more; prepare the data again"
            ) from None

    def _let_go(self, idle_s: float) -> None:
        """Of what has not been read for so long."""
        latest = time.monotonic() - idle_s
        for name in [name for name, in_use in self._open.items() if in_use.used_at <= latest]:
            self._release(name)

    def _release(self, name: str) -> None:
        """What has been mapped may still be read; it is only kept no longer."""
        self._open.pop(name).held.let_go()

    def _note_success(self, name: str) -> None:
        with self._changed:
            if self._trouble.pop(name, None) and not self._trouble:
                _tell(f"{self.place_of(name)}: the data can be read again")

    def _note_failure(self, name: str, error: OSError) -> float:
        with self._changed:
            if not self._trouble:
                _tell(f"{unreachable(self._there.at(name).url, error)}; trying again")
            now = time.monotonic()
            trouble = self._trouble.setdefault(name, Trouble(error, now))
            trouble.cause = error
            trouble.num_failures += 1
        return backoff_s(RETRY_S, trouble.num_failures, LONGEST_RETRY_S)


def _tell(line: str) -> None:
    print(f"elastic: {line}", file=sys.stderr, flush=True)
