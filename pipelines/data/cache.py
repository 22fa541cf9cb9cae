"""A bounded folder of fetched files, shared by all processes of a machine, whoever of them dies.

Locks are the kernel's (`flock`), so that they end with their process. A file is in use while
somebody has it locked. A draft is locked by who writes it, and is as long as it will be from the
beginning: so the sizes of all files together are what the folder takes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Literal

DRAFT = ".partial"
ROOM = ".room"
"""The lock of who makes room; it is never removed."""
READ_BYTES = 1 << 22

Filled = Literal["filled", "busy", "no room"]


@dataclass(frozen=True)
class Wanted:
    """A file by its content: SHA-256 and size."""

    checksum: str
    num_bytes: int


class HeldFile:
    """A file of the cache in use: it stays until it is let go of."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def inode(self) -> int:
        return os.fstat(self._fd).st_ino

    def is_what(self, wanted: Wanted, interrupt: Callable[[], None] = lambda: None) -> bool:
        """Whether its content is what it should be; reads all of it."""
        digest = sha256()
        with open(self.path, "rb") as file:
            while data := file.read(READ_BYTES):
                digest.update(data)
                interrupt()
        return digest.hexdigest() == wanted.checksum

    def let_go(self) -> None:
        with suppress(OSError):  # the cache has been deleted meanwhile
            os.utime(self.path)
        os.close(self._fd)


class ShardCache:
    """Files by checksum in `folder`, together never over `max_bytes`; the least recently used go.

    The folder is made for this user alone. Raises OSError if it cannot be, or is somebody else's.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = folder.lstat()
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it is no folder of this user's own", str(folder))
        with open(folder / ROOM, "ab"):
            pass  # it can be written
        self.folder = folder
        self._max_bytes = max_bytes

    def hold(self, wanted: Wanted) -> HeldFile | None:
        """The file in use, if it is there and of the right size."""
        path = self.folder / wanted.checksum
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH)
        there = os.fstat(fd)
        if there.st_nlink and there.st_size == wanted.num_bytes:
            with suppress(OSError):  # the cache has been deleted meanwhile
                os.utime(path)
            return HeldFile(path, fd)
        os.close(fd)
        return None

    def fill(self, wanted: Wanted, fetch: Callable[[BinaryIO], None]) -> Filled:
        """Have `fetch` write the file, unless another process is about it or all is in use.

        What it raises leaves nothing behind. The content is the caller's to verify, before.
        """
        path = self.folder / wanted.checksum
        draft = path.with_name(path.name + DRAFT)
        with self._alone():
            fd = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
            if not _lock(fd):
                os.close(fd)
                return "busy"
            os.ftruncate(fd, 0)
            is_there = path.exists() and path.stat().st_size == wanted.num_bytes
            if is_there or not self._make_room(wanted.num_bytes):
                draft.unlink()
                os.close(fd)
                return "filled" if is_there else "no room"
            os.ftruncate(fd, wanted.num_bytes)
        with open(fd, "r+b") as out:
            try:
                fetch(out)
                out.flush()
                with self._alone():
                    os.replace(draft, path)
            except BaseException:
                with suppress(OSError):  # what has happened is told by the exception
                    draft.unlink()
                raise
        return "filled"

    def discard(self, held: HeldFile) -> None:
        """A file that is damaged, unless it has been replaced already."""
        with self._alone(), suppress(FileNotFoundError):
            if held.path.stat().st_ino == held.inode():
                held.path.unlink()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # Whoever tidies the temporary folder may have removed it.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.folder / ROOM, "ab") as room:
            fcntl.flock(room, fcntl.LOCK_EX)
            yield

    def _make_room(self, num_bytes: int) -> bool:
        """Remove what was left half written, then the least recently used that nobody uses."""
        there = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # a draft that has just got its name
                    told, is_whole = entry.stat(follow_symlinks=False), entry.name[-8:] != DRAFT
                    there.append((is_whole, told.st_mtime_ns, entry.path, told.st_size))
        excess = sum(size for *_, size in there) + num_bytes - self._max_bytes
        for is_whole, _, path, size in sorted(there):
            if is_whole and excess <= 0:
                break
            if size and _remove_unused(path):
                excess -= size
        return excess <= 0


def _lock(fd: int) -> bool:
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
        is_unused = _lock(fd)
        if is_unused:
            os.unlink(path)
        return is_unused
    finally:
        os.close(fd)
