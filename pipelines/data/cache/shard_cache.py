"""A size-bounded cache folder of fetched files, shared by all processes of a machine.

Locks are the kernel's (`flock`), so they end when their process dies. A file is in use while a
process holds a lock on it. The process that writes a partial file locks it. A partial file has its
final size from the start, so the sum of all file sizes is the disk space that the folder needs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Literal

DRAFT = ".partial"
ROOM = ".room"
"""The lock that a process holds while it evicts files; it is never removed."""
READ_BYTES = 1 << 22

Filled = Literal["filled", "busy", "full"]
"""Outcome of filling: the file is there, another process writes it, or every file is in use."""


@dataclass(frozen=True)
class CacheKey:
    """A cached file: the SHA-256 of its content, or of what determines it, and its size."""

    checksum: str
    num_bytes: int | None
    """None, only of a file that is looked for: any size."""


class HeldFile:
    """A file of the cache that is in use: it is not evicted before `release`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def inode(self) -> int:
        return os.fstat(self._fd).st_ino

    def is_intact(self, key: CacheKey, interrupt: Callable[[], None] = lambda: None) -> bool:
        """Whether the content has the key's checksum; reads the whole file."""
        digest = sha256()
        with open(self.path, "rb") as file:
            while data := file.read(READ_BYTES):
                digest.update(data)
                interrupt()
        return digest.hexdigest() == key.checksum

    def release(self) -> None:
        """Allow the cache to evict the file."""
        with suppress(OSError):  # the cache has been deleted meanwhile
            mark_used(self.path)
        os.close(self._fd)


class ShardCache:
    """Files named by checksum in `folder`, in total at most `max_bytes`, evicted by LRU.

    Only this user may access the folder. Raises OSError if it cannot be created or belongs to
    another user.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "not a folder of this user", str(folder))
        with open(folder / ROOM, "ab"):
            pass  # checks that the folder is writable
        self.folder = folder
        self._max_bytes = max_bytes

    def hold(self, key: CacheKey) -> HeldFile | None:
        """The file, marked as in use, if it is there with the right size."""
        path = self.folder / key.checksum
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH)
        status = os.fstat(fd)
        if status.st_nlink and key.num_bytes in (None, status.st_size):
            with suppress(OSError):  # the cache has been deleted meanwhile
                mark_used(path)
            return HeldFile(path, fd)
        os.close(fd)
        return None

    def fill(self, key: CacheKey, fetch: Callable[[BinaryIO], None]) -> Filled:
        """Let `fetch` write the file, unless another process writes it or every file is in use.

        If `fetch` raises, nothing remains. `fetch` must verify the content that it writes.
        """
        assert key.num_bytes is not None
        path = self.folder / key.checksum
        draft = path.with_name(path.name + DRAFT)
        with self.locked():
            fd = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
            if not lock(fd):
                os.close(fd)
                return "busy"
            os.ftruncate(fd, 0)
            is_cached = path.exists() and path.stat().st_size == key.num_bytes
            if is_cached or not self._evict_for(key.num_bytes):
                draft.unlink()
                os.close(fd)
                return "filled" if is_cached else "full"
            os.ftruncate(fd, key.num_bytes)
        with open(fd, "r+b") as out:
            try:
                fetch(out)
                out.flush()
                os.fsync(out.fileno())  # a process that finds the file trusts it
                with self.locked():
                    os.replace(draft, path)
            except BaseException:
                with suppress(OSError):  # the exception that is raised again says what happened
                    draft.unlink()
                raise
        return "filled"

    def discard(self, held: HeldFile) -> None:
        """Remove a damaged file, unless it has been replaced already."""
        with self.locked(), suppress(FileNotFoundError):
            if held.path.stat().st_ino == held.inode():
                held.path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder, so that other processes neither fill nor evict files."""
        # A cleaner of the temporary folder may have removed it.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.folder / ROOM, "ab") as room:
            fcntl.flock(room, fcntl.LOCK_EX)
            yield

    def _evict_for(self, num_bytes: int) -> bool:
        """Remove abandoned partial files, then unused files by LRU, until `num_bytes` fit.

        Returns whether they fit.
        """
        files = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # a partial file that has just been renamed
                    status, is_whole = entry.stat(follow_symlinks=False), entry.name[-8:] != DRAFT
                    files.append((is_whole, status.st_mtime_ns, entry.path, status.st_size))
        excess = sum(size for *_, size in files) + num_bytes - self._max_bytes
        for is_whole, _, path, size in sorted(files):
            if is_whole and excess <= 0:
                break
            if size and _remove_unused(path):
                excess -= size
        return excess <= 0


def mark_used(path: Path) -> None:
    """Note the time of a use, for the order of evictions. Raises OSError."""
    now_ns = time.time_ns()  # without it, the kernel's clock: two uses within a tick look the same
    os.utime(path, ns=(now_ns, now_ns))


def lock(fd: int) -> bool:
    """Lock an open file alone. Returns whether no other process has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unused(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        is_unused = lock(fd)
        if is_unused:
            os.unlink(path)
        return is_unused
    finally:
        os.close(fd)
