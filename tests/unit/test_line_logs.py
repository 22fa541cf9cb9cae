"""Reading line logs: offsets, reading from the end, and the segments that are in force."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from memory_storage import MemoryStorage

from actors.storage import line_logs as lines_module
from actors.storage.errors import DamagedLog, LeaseFilesMissing
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import SegmentWriter, open_lines
from actors.storage.segments import LogSegment, parse_segments, segment_name, segments_in_force
from actors.storage.storage import DiskStorage


def make_lines(first: int, num_lines: int, width: int = 20) -> bytes:
    rows = ({"number": first + i, "filler": "x" * width} for i in range(num_lines))
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def make_segmented_log(*parts: tuple[int, int, bytes]) -> LineLog:
    """A log of segments, each given as epoch, begin, content."""
    storage: Any = MemoryStorage()
    for epoch, begin, content in parts:
        storage.write(segment_name("log", epoch, begin), content)
    return LineLog(storage, "log")


def read_numbers(log: LineLog, offset: int = 0) -> list[int]:
    return [row["number"] for row in log.lines(offset)]


@pytest.fixture(params=["disk", "segments"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> LineLog:
    """3,000 lines in 3 segments."""
    content = [make_lines(1000 * i, 1000) for i in range(3)]
    if request.param == "disk":
        (tmp_path / "log").write_bytes(b"".join(content))
        return LineLog(DiskStorage(tmp_path), "log")
    begins = [sum(map(len, content[:i])) for i in range(3)]
    return make_segmented_log(
        *((1, begin, part) for begin, part in zip(begins, content, strict=True))
    )


def test_lines_from_end_are_the_lines_reversed(
    log: LineLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = b"".join(log.blocks())
    for block_bytes in (7, 100, 1 << 20):
        monkeypatch.setattr(lines_module, "BLOCK_BYTES", block_bytes)
        from_end = list(log.lines_from_end())
        assert len(from_end) == 3000
        for offset, line in from_end[::97]:
            assert whole[offset : offset + len(line) + 1] == line + b"\n"
        assert [json.loads(line)["number"] for _, line in from_end] == list(range(2999, -1, -1))


def test_lines_are_read_up_to_a_byte(log: LineLog) -> None:
    end = log.find_newest(b'"number": 1700,')
    rows = [row["number"] for _, row in log.lines_with_offsets(0, end)]
    assert rows == list(range(1700))
    assert list(log.lines_with_offsets(0, 0)) == []


def test_find_newest_returns_the_offset_of_a_line(log: LineLog) -> None:
    offset = log.find_newest(b'"number": 1234,')
    assert offset is not None
    assert read_numbers(log, offset) == list(range(1234, 3000))
    assert log.find_newest(b"nothing of the kind") is None
    assert [row["number"] for row in log.last_rows(3)] == [2997, 2998, 2999]


def test_reader_follows_a_growing_log_with_one_listing_per_poll(log: LineLog) -> None:
    reader = log.reader()
    content = b""
    while block := reader.read(5000):
        assert block.endswith(b"\n")
        content += block
    assert content == b"".join(log.blocks()) and reader.offset == len(content)
    if isinstance(log.storage, MemoryStorage):
        log.storage.num_listings = 0
        fresh = log.reader()
        for _ in range(20):
            fresh.read(1000)
        assert log.storage.num_listings == 1
        log.storage.write(segment_name("log", 2, reader.offset), make_lines(3000, 2))
    else:
        with open(log.url, "ab") as file:
            file.write(make_lines(3000, 2) + b'{"half')
    assert reader.read().count(b"\n") == 2
    assert reader.read() == b""


def test_late_segments_of_an_older_epoch_are_ignored() -> None:
    first = make_lines(0, 10)
    limit = len(make_lines(0, 4))
    log = make_segmented_log(
        (1, 0, first), (1, len(first), make_lines(90, 3)), (2, limit, make_lines(4, 3))
    )
    assert read_numbers(log) == list(range(7))
    log.storage.write(segment_name("log", 3, limit), b"")  # epoch 3 begins at the same byte
    assert read_numbers(log) == list(range(4))


def test_gap_and_truncated_segment_are_detected() -> None:
    content = [make_lines(10 * i, 10) for i in range(3)]
    begins = [sum(map(len, content[:i])) for i in range(3)]
    hole = make_segmented_log((1, 0, content[0]), (1, begins[2], content[2]))
    cut = make_segmented_log((1, 0, content[0][:-5]), (1, begins[1], content[1]))
    for log, readable_numbers in (
        (hole, [*range(10), *range(20, 30)]),
        (cut, [*range(9), *range(10, 20)]),
    ):
        with pytest.raises(DamagedLog, match="is followed by a gap of"):
            read_numbers(log)
        assert [row["number"] for row in log.rows()] == readable_numbers


def test_log_begins_after_its_dropped_segments() -> None:
    log = make_segmented_log((1, 1000, make_lines(5, 5)))
    assert read_numbers(log) == list(range(5, 10))


def test_damaged_line_is_reported_by_its_offset(tmp_path: Path) -> None:
    before = make_lines(0, 3)
    for garbage in (b"\x00\xff{", b"[1, 2]", b"", b"null"):
        (tmp_path / "log").write_bytes(before + garbage + b"\n" + make_lines(3, 2))
        log = LineLog(DiskStorage(tmp_path), "log")
        with pytest.raises(DamagedLog, match=f"the line at byte {len(before)} is no JSON object"):
            read_numbers(log)
        assert [row["number"] for row in log.rows()] == list(range(5))


def test_compacted_segment_replaces_its_segments() -> None:
    content = [make_lines(10 * i, 10) for i in range(3)]
    begins = [sum(map(len, content[:i])) for i in range(3)]
    log = make_segmented_log(
        *((1, begin, part) for begin, part in zip(begins, content, strict=True))
    )
    closed = log.segments()[:2]
    log.compact(closed, make_lines(3, 1))
    assert read_numbers(log) == [3, *range(20, 30)]  # before the replaced segments are removed
    log.remove_segments(closed)
    assert read_numbers(log) == [3, *range(20, 30)]
    # The compacted segment has been read.
    assert read_numbers(log, begins[1]) == list(range(20, 30))
    assert log.find_newest(b'"number": 3,') == 0
    writer = open_lines(log)
    writer.write({"number": 30})
    writer.close()
    assert read_numbers(log) == [3, *range(20, 31)]


def test_compaction_by_an_older_epoch_is_ignored() -> None:
    names = {segment_name("log", 1, 0): 100, segment_name("log", 2, 60): 10}
    late_segment = {segment_name("log", 1, 0, 100): 5}
    in_force = segments_in_force(parse_segments({**names, **late_segment}))
    assert [(s.epoch, s.begin, s.end) for s in in_force] == [(1, 0, 60), (2, 60, 70)]


def test_overlapping_segments_are_read_once() -> None:
    whole = make_lines(0, 4)
    half = len(make_lines(0, 2))
    log = make_segmented_log((1, 0, make_lines(0, 3)), (1, half, whole[half:]))
    assert read_numbers(log) == [0, 1, 2, 3]
    assert isinstance(log.segments()[1], LogSegment)


def test_opening_truncates_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(make_lines(0, 2) + b'{"number": 2, "fil')
    with open_and_close(LineLog(DiskStorage(tmp_path), "log")) as log:
        assert read_numbers(log) == [0, 1]
    path.write_bytes(b"half" * 1000)
    with open_and_close(LineLog(DiskStorage(tmp_path), "log")) as log:
        assert read_numbers(log) == []


@contextmanager
def open_and_close(log: LineLog) -> Iterator[LineLog]:
    writer = open_lines(log)
    yield log
    assert writer.close() == ""


def test_log_with_segments_of_a_newer_epoch_is_not_opened() -> None:
    with pytest.raises(LeaseFilesMissing, match="files of lease/ were removed"):
        open_lines(make_segmented_log((7, 0, make_lines(0, 1))), epoch=3)


@pytest.mark.parametrize("appends_between", [False, True])
def test_failed_write_that_takes_effect_later_loses_no_line(appends_between: bool) -> None:
    """An object store may execute a request whose answer was lost after newer requests."""
    storage: Any = MemoryStorage()
    log = LineLog(storage, "log")
    writer = SegmentWriter(log)
    writer.append({"number": 0})
    writer.ship()
    writer.append({"number": 1})
    late_objects = dict(storage.objects)
    storage.refusal = OSError(110, "Connection timed out")
    with pytest.raises(OSError):
        writer.ship()
    storage.refusal = None
    [name] = late_objects
    late_objects[name] += b'{"number": 1}\n'
    if appends_between:
        writer.append({"number": 2})
    for number in (3, 4):
        writer.ship()
        writer.append({"number": number})
    writer.ship()
    before = read_numbers(log)
    storage.objects.update(late_objects)
    assert read_numbers(log) == before == [0, 1, *([2] if appends_between else []), 3, 4]
