"""Writers of line logs, for which training never waits.

Lines that storage does not accept wait in memory until it does. A writer that has lost its lease
writes nothing more.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from actors.storage.errors import LeaseFilesMissing, LeaseLost
from actors.storage.line_epochs import line_of
from actors.storage.line_logs import BLOCK_BYTES, LineLog
from actors.storage.segments import LogSegment, segment_name, segments_in_force
from actors.storage.storage import DiskStorage

SEGMENT_BYTES = 1 << 20
SHIP_EVERY_S = 1.0
RETRY_EVERY_S = 0.5
CLOSE_PATIENCE_S = 120.0
"""How long closing a log tries to write the last lines."""
CUT_PATIENCE_S, CUT_PAUSE_S = 10.0, 0.02
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

Check = Callable[[], None]
"""Raises `LeaseLost` if this process must not write any more."""


class Lines(Protocol):
    """The only writer of a log. `trouble` says why storage accepts nothing now, or is empty."""

    trouble: str

    @property
    def num_waiting(self) -> int:
        """How many lines storage has not accepted yet."""

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; if storage does not accept it, it waits in memory."""

    def flush(self) -> None:
        """Try again to write the waiting lines."""

    def make_durable(self) -> None:
        """Make the written lines survive a crash of the machine, if storage allows it."""

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> str:
        """Try for `patience_s` to write the waiting lines; returns a message about the lines that
        could not be written, or ""."""


def check_nothing() -> None:
    """The check of a log that no lease guards."""


def open_lines(
    log: LineLog,
    epoch: int | None = None,
    check: Check = check_nothing,
    opens_later: bool = False,
) -> Lines:
    """Open a log for appending; from now on, readers ignore what older epochs write.

    `epoch` is that of the writer's lease; by default one more than the newest in the log. `check`
    is called before each upload. Raises OSError, and `LeaseFilesMissing` if the log has a newer
    epoch. With `opens_later` it raises neither and does not wait for an object store: the log is
    opened when the first lines are written, and lines are dropped if the log has a newer epoch.
    """
    if isinstance(log.storage, DiskStorage):
        return LineFile(log.storage.path / log.name, check, opens_later)
    return ShippedLines(log, epoch, check, opens_later)


class LineFile:
    """A file on a disk, flushed line by line, so that a reader can follow it live.

    `write` and `flush` raise `LeaseLost` once `check` does, and then write nothing. With an
    `epoch`, each line carries it, and readers skip lines of an older epoch after such a line.
    """

    def __init__(
        self,
        path: Path,
        check: Check = check_nothing,
        opens_later: bool = False,
        epoch: int | None = None,
    ) -> None:
        self._path = path
        self._check = check
        self._epoch = epoch
        self._file = None if opens_later else _open_at_end(path, check)
        self._pending = bytearray()
        self.trouble = ""

    @property
    def num_waiting(self) -> int:
        return self._pending.count(b"\n")

    def write(self, line: dict[str, Any]) -> None:
        self._pending += line_of(line, self._epoch)
        self.flush()

    def flush(self) -> None:
        try:
            while self._pending:
                self._check()  # before each line: at most one follows those of a newer owner
                self._file = self._file or _open_at_end(self._path, self._check)
                line = self._pending[: self._pending.index(b"\n") + 1]
                del self._pending[: self._file.write(line)]  # a full disk may accept a part of it
            self.trouble = ""
        except LeaseLost:
            self._pending.clear()  # the newer owner goes on from the lines that it has read
            raise
        except OSError as error:
            self.trouble = str(error)

    def make_durable(self) -> None:
        if self._file is None:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self.trouble = str(error)

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> str:
        deadline = time.monotonic() + patience_s
        try:
            while self._pending:
                self.flush()
                if not self._pending or time.monotonic() > deadline:
                    break
                time.sleep(RETRY_EVERY_S)
        except LeaseLost:
            pass  # `flush` has dropped the waiting lines: readers would ignore them
        if self._file is not None:
            self._file.close()
        return _lost_lines_message(self._path.name, self.num_waiting, self.trouble)


class SegmentWriter:
    """Writes segments of one epoch when `ship` is called; lines wait until storage accepts them.

    Raises OSError, and `LeaseFilesMissing` if the log has segments of a newer epoch. With
    `opens_later`, the first `ship` opens the log, and its first segment supersedes older epochs.
    """

    def __init__(
        self,
        log: LineLog,
        epoch: int | None = None,
        check: Check = check_nothing,
        segment_bytes: int = SEGMENT_BYTES,
        begin: int | None = None,
        opens_later: bool = False,
    ) -> None:
        """`begin` is the byte from which existing content is superseded; by default the end."""
        self._log = log
        self._wanted_epoch, self._wanted_begin = epoch, begin
        self._epoch = self._begin = 0
        self._check = check
        self._segment_bytes = segment_bytes
        self._segment = b""
        self._num_tried = 0
        """How many of the waiting lines were in an upload that failed."""
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        self._is_open = self._is_lost = False
        if not opens_later:
            self._open()
            self._check()
            log.storage.write(self._name(), b"")  # from here on, older epochs are superseded

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _open(self) -> None:
        """Only reads, so it can be tried again."""
        epoch, begin = self._wanted_epoch, self._wanted_begin
        segments = self._log.all_segments()
        newest = max((segment.epoch for segment in segments), default=0)
        self._epoch = newest + 1 if epoch is None else epoch
        if newest > self._epoch:
            raise LeaseFilesMissing(
                f"{self._log.url} has segments of epoch {newest}, but the lease is of epoch "
                f"{self._epoch}: files of lease/ were removed"
            )
        self._begin = _end_of(self._log, segments_in_force(segments)) if begin is None else begin
        self._is_open = True

    def append(self, line: dict[str, Any]) -> None:
        """Queue a line; from any thread."""
        with self._lock:
            if not self._is_lost:
                self._waiting.append(json.dumps(line, allow_nan=False).encode() + b"\n")

    def ship(self) -> None:
        """Write the waiting lines, a segment at a time.

        Raises OSError, or `LeaseLost`: then the waiting lines are dropped, since the newer owner
        goes on from the lines that it has read.
        """
        if self._waiting and not self._is_open:
            self._open_late()
        while self._waiting:
            with self._lock:
                num_lines, segment = self._num_tried, self._segment
                segment += b"".join(self._waiting[:num_lines])
                while not self._num_tried and num_lines < len(self._waiting):
                    if len(segment) >= self._segment_bytes:
                        break
                    segment += self._waiting[num_lines]
                    num_lines += 1
            self._upload(segment, num_lines)
            with self._lock:
                del self._waiting[:num_lines]

    def _upload(self, segment: bytes, num_lines: int) -> None:
        """A failed write may still take effect at any time. So it is repeated with the same
        content, and once that has succeeded, the object is never replaced again."""
        try:
            self._check()
            self._log.storage.write(self._name(), segment)
        except LeaseLost:
            self._drop_all()
            raise
        except Exception:  # of any kind: the write may have reached the storage
            self._num_tried = num_lines
            raise
        self._segment = segment
        if len(segment) >= self._segment_bytes or self._num_tried:
            self._begin += len(segment)
            self._segment, self._num_tried = b"", 0

    def _open_late(self) -> None:
        try:
            self._open()
        except LeaseFilesMissing as error:
            self._drop_all()
            raise LeaseLost(str(error)) from error

    def _drop_all(self) -> None:
        """Drop all waiting and future lines: readers would ignore them."""
        with self._lock:
            self._is_lost = True
            self._waiting.clear()

    def _name(self) -> str:
        return segment_name(self._log.name, self._epoch, self._begin)


class ShippedLines:
    """Segments on an object store, uploaded by a thread: durable within about a second."""

    def __init__(
        self, log: LineLog, epoch: int | None, check: Check, opens_later: bool = False
    ) -> None:
        self._name = log.name
        self._segments = SegmentWriter(log, epoch, check, opens_later=opens_later)
        self._is_due = threading.Event()
        self._deadline = float("inf")
        self._is_closed = False
        self.trouble = ""
        self._thread = threading.Thread(target=self._ship_until_closed, name="lines", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return self._segments.num_waiting

    def write(self, line: dict[str, Any]) -> None:
        self._segments.append(line)

    def flush(self) -> None:
        """The thread tries again by itself."""

    def make_durable(self) -> None:
        """Start the upload at once, without waiting for the object store."""
        self._is_due.set()

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> str:
        self._deadline = time.monotonic() + patience_s
        self._is_closed = True
        self._is_due.set()
        self._thread.join(patience_s + RETRY_EVERY_S)
        return _lost_lines_message(self._name, self.num_waiting, self.trouble)

    def _ship_until_closed(self) -> None:
        with suppress(LeaseLost):
            while not self._is_closed:
                self._is_due.wait(SHIP_EVERY_S)
                self._is_due.clear()
                self._try_to_ship()
            while not self._try_to_ship() and time.monotonic() < self._deadline:
                time.sleep(RETRY_EVERY_S)

    def _try_to_ship(self) -> bool:
        try:
            self._segments.ship()
            self.trouble = ""
        except LeaseLost:
            raise
        except Exception as error:  # of any kind: the lines still wait, and the thread goes on
            self.trouble = _cause_of(error)
        return not self.trouble


def _cause_of(error: Exception) -> str:
    """A message that is never empty. An OSError's text is enough; others need their type."""
    if isinstance(error, OSError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _lost_lines_message(name: str, num_lines: int, cause: str) -> str:
    if not num_lines:
        return ""
    cause = cause or "the storage has not answered"
    return f"{num_lines:,} {'line' if num_lines == 1 else 'lines'} of {name} not written: {cause}"


def _end_of(log: LineLog, segments: list[LogSegment]) -> int:
    """The end of the last whole line."""
    if not segments or segments[-1].is_compacted:
        return segments[-1].end if segments else 0
    last = segments[-1]
    content = log.storage.read(last.name, last.begin - last.object_begin, last.end - last.begin)
    return last.begin + content.rfind(b"\n") + 1


def _open_at_end(path: Path, check: Check) -> FileIO:
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "ab", buffering=0))
        with cutting(file):
            check()
            _cut_half_line(path)
        stack.pop_all()  # it stays open for the run
    return file


@contextmanager
def cutting(file: FileIO) -> Iterator[None]:
    """Lock a log against other processes while this one truncates its end.

    Otherwise a process that is stopped before it truncates could cut off what a newer owner has
    written. Raises `OSError` if another process holds the lock for `CUT_PATIENCE_S`. On a file
    system without locks, nothing is locked.
    """
    deadline = time.monotonic() + CUT_PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(
                    errno.EAGAIN, "another process is opening this log", file.name
                ) from None
            time.sleep(CUT_PAUSE_S)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            break
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def _cut_half_line(path: Path) -> None:
    """Remove half a line at the end: its writer died before the line was complete."""
    with open(path, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size:
            file.truncate(end)
