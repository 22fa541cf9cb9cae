"""Readers of append-only logs of JSON lines, on a disk or on an object store.

On a disk a log is one file. On an object store, which cannot append, it is a folder of segments.
Offsets are bytes of the whole log; they stay valid when old segments are compacted or dropped.
The writers are in `actors.storage.line_writers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from actors.storage.errors import DamagedLog
from actors.storage.line_epochs import first_in_force, has_epochs, in_force_from_end, newest_epoch
from actors.storage.segments import LogSegment, parse_segments, segment_name, segments_in_force
from actors.storage.storage import DiskStorage, Storage

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class LineLog:
    """The log `name` in `storage`: one JSON object a line. All methods may raise OSError."""

    storage: Storage
    name: str

    @property
    def url(self) -> str:
        return self.storage.at(self.name).url

    def exists(self) -> bool:
        if isinstance(self.storage, DiskStorage):
            return self.storage.size(self.name) is not None
        return bool(self.segments())

    def segments(self) -> list[LogSegment]:
        """The segments in force, in order: one listing. A file on a disk is one segment."""
        if isinstance(self.storage, DiskStorage):
            size = self.storage.size(self.name)
            return [LogSegment(self.name, 0, 0, size)] if size else []
        return segments_in_force(self.all_segments())

    def all_segments(self) -> list[LogSegment]:
        """On an object store: all segments, superseded ones as well, in no order."""
        return parse_segments(self.storage.files(self.name))

    def reader(self, offset: int = 0, strict: bool = False) -> LogReader:
        """A reader that starts at byte `offset` and follows the log as it grows."""
        return LogReader(self, offset, strict)

    def blocks(self, offset: int = 0) -> Iterator[bytes]:
        """The whole lines from byte `offset` on, about a MiB at a time; lost lines are skipped."""
        return self.reader(offset).blocks()

    def lines(self, offset: int = 0) -> Iterator[dict[str, Any]]:
        """The whole lines from byte `offset` on. Raises `DamagedLog` for a gap, and for a line that
        is no JSON object."""
        return (row for _, row in self.lines_with_offsets(offset))

    def lines_with_offsets(
        self, offset: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """As `lines`, up to byte `end`, each line with the byte at which it begins.

        All lines of a compacted segment have the offset of the segment.
        """
        reader = self.reader(offset, strict=True)
        while (end is None or reader.offset < end) and (block := reader.read()):
            begin = reader.begin
            for line in block.split(b"\n")[:-1]:
                if end is not None and begin >= end:
                    return
                row = parse_line(line)
                if row is None:
                    raise DamagedLog(self.url, begin, "is no JSON object")
                yield begin, row
                if not reader.is_compacted:
                    begin += len(line) + 1

    def rows(self, offset: int = 0) -> Iterator[dict[str, Any]]:
        """The whole lines from byte `offset` on, without lost lines and lines that are no JSON
        objects."""
        for block in self.blocks(offset):
            for line in block.split(b"\n")[:-1]:
                row = parse_line(line)
                if row is not None:
                    yield row

    def lines_from_end(self) -> Iterator[tuple[int, bytes]]:
        """Each whole line with its offset, newest first; reads a block at a time.

        All lines of a compacted segment have the offset of the segment.
        """
        for segment in reversed(self.segments()):
            lines = _lines_from_end(self.storage, segment)
            yield from in_force_from_end(lines) if segment.name == self.name else lines

    def last_rows(self, num_rows: int) -> list[dict[str, Any]]:
        """The newest `num_rows` JSON objects, in the order of the log."""
        rows: list[dict[str, Any]] = []
        for _, line in self.lines_from_end():
            if len(rows) >= num_rows:
                break
            row = parse_line(line)
            if row is not None:
                rows.append(row)
        return rows[::-1]

    def find_newest(self, marker: bytes, end: int | None = None) -> int | None:
        """The offset of the newest JSON object before byte `end` whose line contains `marker`."""
        for offset, line in self.lines_from_end():
            if end is not None and offset >= end:
                continue
            if marker in line and parse_line(line) is not None:
                return offset
        return None

    def compact(self, segments: Sequence[LogSegment], lines: bytes) -> None:
        """On an object store: write one segment that replaces these adjacent segments in force.

        The caller checks its lease before this call, and again before it removes the segments. An
        interruption loses nothing: readers prefer the compacted segment once it exists.
        """
        epoch = max(segment.epoch for segment in segments)
        name = segment_name(self.name, epoch, segments[0].begin, segments[-1].end)
        self.storage.write(name, lines)

    def remove_segments(self, segments: Sequence[LogSegment]) -> None:
        """On an object store: remove segments that are compacted or no longer needed."""
        for segment in segments:
            self.storage.remove(segment.name)


class LogReader:
    """Reads whole lines from a byte of a log on; `offset` is the end of the last returned line.

    It lists the segments once, and again only when it has reached their end. With `strict` it
    raises `DamagedLog` for lost bytes; otherwise it skips and counts them in `num_lost_bytes`.
    """

    def __init__(self, log: LineLog, offset: int = 0, strict: bool = False) -> None:
        self.offset = offset
        self.begin = offset
        """The byte at which the last returned lines begin."""
        self.is_compacted = False
        """Whether they come from a compacted segment."""
        self.num_lost_bytes = 0
        self._log = log
        self._strict = strict
        self._segments: list[LogSegment] = []
        self._is_begun = offset > 0
        """Bytes missing before the first line are not lost: they were dropped on purpose."""
        self._newest_epoch: int | None = None
        """The newest epoch so far in a file on a disk; None while it is unknown."""

    def read(self, max_bytes: int = BLOCK_BYTES) -> bytes:
        """The next whole lines, about `max_bytes` of them; empty if there are no more now."""
        lines = self._next_lines(max_bytes)
        if not lines:
            self._segments = self._log.segments()
            lines = self._next_lines(max_bytes)
        return lines

    def blocks(self, max_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
        """All whole lines that exist now, about `max_bytes` at a time."""
        self._segments = self._log.segments()
        while block := self._next_lines(max_bytes):
            yield block

    def _next_lines(self, max_bytes: int) -> bytes:
        for index, segment in enumerate(self._segments):
            if segment.end <= self.offset:
                continue
            self._enter(segment)
            is_last = index == len(self._segments) - 1
            while self.offset < segment.end:
                before = self.offset
                lines = self._lines_of(segment, max_bytes, is_last)
                if lines:
                    return lines
                if self.offset == before:
                    break  # only half a line is left
        return b""

    def _enter(self, segment: LogSegment) -> None:
        """Skip the gap between the previous segment and this one."""
        if segment.begin > self.offset:
            if self._is_begun:
                self._lose(segment.begin - self.offset)
            self.offset = segment.begin
        self._is_begun = True

    def _lines_of(self, segment: LogSegment, max_bytes: int, is_last: bool) -> bytes:
        storage = self._log.storage
        self.begin, self.is_compacted = self.offset, segment.is_compacted
        if segment.is_compacted:
            has_been_read = self.offset > segment.begin
            self.offset = segment.end
            return b"" if has_been_read else storage.read(segment.name)
        while True:
            left = segment.end - self.offset
            first = self.offset - segment.object_begin
            block = storage.read(segment.name, first, min(left, max_bytes))
            end = block.rfind(b"\n") + 1
            if end or max_bytes >= left:
                break
            max_bytes *= 2
        if not end and not is_last:  # the rest of this segment is lost
            self._lose(left)
            self.offset = segment.end
        lines = block[:end]
        if segment.name == self._log.name and has_epochs(lines):
            lines = self._in_force(lines)
        self.offset += len(lines)
        return lines

    def _in_force(self, lines: bytes) -> bytes:
        """Skip stale lines; returns the lines from there up to the next stale one."""
        if self._newest_epoch is None:
            before = LogSegment(self._log.name, 0, 0, self.offset)
            from_end = _lines_from_end(self._log.storage, before)
            self._newest_epoch = newest_epoch(line for _, line in from_end)
        skipped, lines, self._newest_epoch = first_in_force(lines, self._newest_epoch)
        self.offset += skipped
        self.begin = self.offset
        return lines

    def _lose(self, num_bytes: int) -> None:
        if self._strict:
            raise DamagedLog(
                self._log.url, self.offset, f"is followed by a gap of {num_bytes} bytes"
            )
        self.num_lost_bytes += num_bytes


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line's JSON object; None if the line is not one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _lines_from_end(storage: Storage, segment: LogSegment) -> Iterator[tuple[int, bytes]]:
    if segment.is_compacted:
        for line in reversed(storage.read(segment.name).split(b"\n")[:-1]):
            yield segment.begin, line
        return
    end, later = segment.end, b""
    while end > segment.begin:
        begin = max(segment.begin, end - BLOCK_BYTES)
        block = storage.read(segment.name, begin - segment.object_begin, end - begin) + later
        *lines, half = block.split(b"\n")  # half a line can only be at the end of the segment
        offset = begin + len(block) - len(half)
        is_first_half = begin > segment.begin and bool(lines)
        for line in reversed(lines[is_first_half:]):
            offset -= len(line) + 1
            yield offset, line
        later = lines[0] + b"\n" if is_first_half else b"" if lines else block
        end = begin
