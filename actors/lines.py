"""Files of lines that only grow, also where storage cannot append; training never waits for them.

On a disk one is a file. On an object store it is a folder of segments, each named by the byte at
which it begins; the last is replaced while it grows. Lines that storage does not take now are kept
in memory until it does.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from actors.storage import DiskStorage, Storage

SEGMENT_BYTES = BLOCK_BYTES = 1 << 20
SHIP_EVERY_S = 1.0
LAST_TRIES_S = 30.0


@dataclass(frozen=True)
class LineLog:
    """One JSON object a line, as its readers see it: `name` in `storage`."""

    storage: Storage
    name: str

    @property
    def url(self) -> str:
        return self.storage.at(self.name).url

    def exists(self) -> bool:
        if isinstance(self.storage, DiskStorage):
            return self.storage.size(self.name) is not None
        return bool(segments(self))

    def read(self, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """From a byte on; nothing if it is not there yet. Raises OSError."""
        if isinstance(self.storage, DiskStorage):
            if self.storage.size(self.name) is None:
                return b""
            return self.storage.read(self.name, offset, max_bytes)
        found, wanted = bytearray(), max_bytes
        for begin, size in segments(self).items():
            if begin + size > offset and (wanted is None or wanted > 0):
                piece = self.storage.read(segment_name(self, begin), offset - begin, wanted)
                found += piece
                offset += len(piece)
                wanted = None if wanted is None else wanted - len(piece)
        return bytes(found)

    def blocks(self, offset: int = 0) -> Iterator[bytes]:
        """All that is there from a byte on, some at a time."""
        while block := self.read(offset, BLOCK_BYTES):
            yield block
            offset += len(block)

    def lines(self) -> Iterator[dict[str, Any]]:
        """The whole lines that are there."""
        rest = b""
        for block in self.blocks():
            *whole, rest = (rest + block).split(b"\n")
            yield from map(json.loads, whole)


def segments(log: LineLog) -> dict[int, int]:
    """Where each begins, and its size, in order."""
    files = log.storage.files(log.name)
    return {int(name.rpartition("/")[2]): size for name, size in sorted(files.items())}


def segment_name(log: LineLog, begin: int) -> str:
    return f"{log.name}/{begin:016d}"


class Lines(Protocol):
    """As its one writer sees it. `trouble` is why storage takes nothing at present, or empty."""

    trouble: str

    def write(self, line: dict[str, Any]) -> None: ...

    def make_durable(self) -> None:
        """What has been written outlives the machine, if storage lets it."""

    def close(self) -> None: ...


def open_lines(log: LineLog) -> Lines:
    """Go on writing where an earlier writer stopped. Raises OSError."""
    if isinstance(log.storage, DiskStorage):
        return LineFile(log.storage.path / log.name)
    return ShippedLines(log)


class LineFile:
    """A file on a disk, flushed line by line, so that a reader may follow it live."""

    def __init__(self, path: Path) -> None:
        _cut_half_line(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (it stays open for the run)
        self._pending = bytearray()
        self.trouble = ""

    def write(self, line: dict[str, Any]) -> None:
        self._pending += json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            while self._pending:  # a full disk may have taken a part of the line
                del self._pending[: self._file.write(self._pending)]
            self.trouble = ""
        except OSError as error:
            self.trouble = str(error)

    def make_durable(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self.trouble = str(error)

    def close(self) -> None:
        self._file.close()


class ShippedLines:
    """Segments on an object store, brought there by a thread: durable within about a second."""

    def __init__(self, log: LineLog) -> None:
        self._log = log
        there = segments(log)
        self._begin = max(there, default=0)
        self._segment = b""
        if there:
            whole = log.storage.read(segment_name(log, self._begin))
            self._segment = whole[: whole.rfind(b"\n") + 1]
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        self._is_due = threading.Event()
        self._closed = False
        self.trouble = ""
        self._thread = threading.Thread(target=self._serve, name="lines", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._waiting.append(json.dumps(line, allow_nan=False).encode() + b"\n")

    def make_durable(self) -> None:
        """It is under way at once: nothing waits for an object store."""
        self._is_due.set()

    def close(self) -> None:
        self._closed = True
        self._is_due.set()
        self._thread.join(LAST_TRIES_S)

    def _serve(self) -> None:
        while not self._closed:
            self._is_due.wait(SHIP_EVERY_S)
            self._is_due.clear()
            self._ship()
        while self._waiting:
            self._ship()

    def _ship(self) -> None:
        """Bring what waits there, a segment at a time, as far as storage takes it."""
        with self._lock:
            waiting = list(self._waiting)
        num_shipped, segment = 0, self._segment
        while num_shipped < len(waiting):
            num_lines = num_shipped
            while num_lines < len(waiting) and len(segment) < SEGMENT_BYTES:
                segment += waiting[num_lines]
                num_lines += 1
            try:
                self._log.storage.write(segment_name(self._log, self._begin), segment)
            except OSError as error:
                self.trouble = str(error)
                break
            self.trouble, num_shipped, self._segment = "", num_lines, segment
            if len(segment) >= SEGMENT_BYTES:
                self._begin += len(segment)
                self._segment = segment = b""
        with self._lock:
            del self._waiting[:num_shipped]


def _cut_half_line(path: Path) -> None:
    """A writer that died in the middle of a line has written nothing."""
    with suppress(FileNotFoundError), open(path, "rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
