"""Writers of line logs while storage fails, with real failures of the operating system."""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from memory_storage import MemoryStorage

from actors.storage.errors import LeaseLost
from actors.storage.lease import claim
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import LineFile, open_lines
from actors.storage.storage import DiskStorage

LIMIT_BYTES = 1 << 16
LINE = {"filler": "x" * 1000}


@contextmanager
def limit_file_size(num_bytes: int) -> Iterator[None]:
    """Like a full disk, the kernel rejects bytes beyond the limit: part of a line is written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_reach_a_full_disk_once_it_has_space(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "log")
    with limit_file_size(LIMIT_BYTES):
        for number in range(100):
            lines.write({"number": number, **LINE})
        assert "File too large" in lines.trouble and lines.num_waiting > 30
    lines.flush()  # without a further line
    assert (lines.trouble, lines.num_waiting) == ("", 0)
    assert [row["number"] for row in read_rows(tmp_path / "log")] == list(range(100))
    assert lines.close() == ""


def test_close_retries_for_its_patience_and_reports_lost_lines(tmp_path: Path) -> None:
    with limit_file_size(LIMIT_BYTES):
        lines = LineFile(tmp_path / "log")
        for number in range(100):
            lines.write({"number": number, **LINE})
        num_waiting = lines.num_waiting
        started = time.monotonic()
        problem = lines.close(patience_s=1.0)
        assert 1.0 <= time.monotonic() - started < 5.0
    assert problem == f"{num_waiting} lines of log not written: [Errno 27] File too large"
    open_lines(LineLog(DiskStorage(tmp_path), "log")).close()
    assert len(read_rows(tmp_path / "log")) == 100 - num_waiting


def test_close_writes_lines_once_there_is_space(tmp_path: Path) -> None:
    closed: list[str] = []
    with limit_file_size(LIMIT_BYTES):
        lines = LineFile(tmp_path / "log")
        for number in range(100):
            lines.write({"number": number, **LINE})
        closing = threading.Thread(target=lambda: closed.append(lines.close()))
        closing.start()
        time.sleep(1.5)
    closing.join()
    assert closed == [""] and len(read_rows(tmp_path / "log")) == 100


def test_waiting_lines_are_dropped_after_a_lost_lease(tmp_path: Path) -> None:
    run = DiskStorage(tmp_path)
    lease = claim(run, actor="a")
    lines = LineFile(tmp_path / "log", lease.check_now)
    with limit_file_size(LIMIT_BYTES):
        for number in range(100):
            lines.write({"number": number, **LINE})
    size = (tmp_path / "log").stat().st_size
    claim(run, actor="a")
    assert lines.close() == ""
    assert (tmp_path / "log").stat().st_size == size


def test_lines_reach_an_object_store_once_it_accepts_writes() -> None:
    storage: Any = MemoryStorage()
    log = LineLog(storage, "log")
    lines = open_lines(log)
    storage.refusal = OSError(28, "No space left on device")
    for number in range(10):
        lines.write({"number": number})
    lines.make_durable()
    deadline = time.monotonic() + 10.0
    while not lines.trouble and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (lines.trouble, lines.num_waiting) == ("[Errno 28] No space left on device", 10)
    assert lines.close(patience_s=1.0) == (
        "10 lines of log not written: [Errno 28] No space left on device"
    )
    storage.refusal = None
    reopened = open_lines(log)
    reopened.write({"number": 10})
    assert reopened.close() == ""
    assert [row["number"] for row in log.lines()] == [10]


def test_nothing_is_uploaded_after_a_lost_lease() -> None:
    storage: Any = MemoryStorage()
    lease = claim(storage, actor="a")
    lines = open_lines(LineLog(storage, "log"), lease.epoch, lease.check_now)
    newer = claim(storage, actor="a")
    with pytest.raises(LeaseLost):
        lease.check_now()
    before = dict(storage.objects)
    lines.write({"number": 1})
    assert lines.close() == ""
    assert storage.objects == before
    newer.release()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("refusal", "trouble"),
    [
        (ValueError("broken answer"), "ValueError: broken answer"),
        (RuntimeError("can't start new thread"), "RuntimeError: can't start new thread"),
        (MemoryError(), "MemoryError"),
        (OSError(), "OSError"),
    ],
)
def test_lines_are_written_after_an_exception_of_any_kind(refusal: Exception, trouble: str) -> None:
    storage: Any = MemoryStorage()
    log = LineLog(storage, "log")
    lines = open_lines(log)
    storage.refusal = refusal
    lines.write({"number": 0})
    lines.make_durable()
    wait_until(lambda: bool(lines.trouble))
    assert (lines.trouble, lines.num_waiting) == (trouble, 1)
    lines.write({"number": 1})
    storage.refusal = None
    lines.make_durable()
    wait_until(lambda: not lines.trouble and not lines.num_waiting)
    assert lines.close() == ""
    assert [row["number"] for row in log.lines()] == [0, 1]


def test_lines_lost_to_an_exception_are_reported_with_its_cause() -> None:
    storage: Any = MemoryStorage()
    lines = open_lines(LineLog(storage, "log"))
    storage.refusal = ValueError("broken answer")
    lines.write({"number": 0})
    assert lines.close(patience_s=0.1) == "1 line of log not written: ValueError: broken answer"


class Blocked(MemoryStorage):
    """A storage that blocks until `answers` is set, and then raises `refusal` if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def files(self, folder: str = "") -> dict[str, int]:
        assert self.answers.wait(20.0)
        if self.refusal:
            raise self.refusal
        return super().files(folder)


def test_log_that_opens_later_does_not_wait_and_loses_no_line() -> None:
    storage: Any = Blocked()
    storage.write("log/00000002-0000000000000000", b'{"number": 0}\n')
    storage.refusal = OSError(110, "Connection timed out")
    lines = open_lines(LineLog(storage, "log"), epoch=3, opens_later=True)
    lines.write({"number": 1})
    lines.make_durable()
    storage.answers.set()
    wait_until(lambda: bool(lines.trouble))
    lines.write({"number": 2})
    assert (lines.trouble, lines.num_waiting) == ("[Errno 110] Connection timed out", 2)
    storage.refusal = None
    assert lines.close() == ""
    assert [row["number"] for row in LineLog(storage, "log").lines()] == [0, 1, 2]


def test_log_that_opens_later_drops_lines_that_a_newer_epoch_supersedes() -> None:
    storage: Any = MemoryStorage()
    open_lines(LineLog(storage, "log"), epoch=7).close()
    before = dict(storage.objects)
    lines = open_lines(LineLog(storage, "log"), epoch=3, opens_later=True)
    lines.write({"number": 1})
    lines.make_durable()
    wait_until(lambda: not lines.num_waiting)
    lines.write({"number": 2})
    assert lines.num_waiting == 0 and lines.close() == ""
    assert storage.objects == before


def test_file_that_opens_later_is_opened_once_its_folder_can_be_created(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    lines = open_lines(LineLog(DiskStorage(tmp_path / "run"), "log"), opens_later=True)
    lines.make_durable()
    lines.write({"number": 0})
    assert "Not a directory" in lines.trouble and lines.num_waiting == 1
    (tmp_path / "run").unlink()
    lines.write({"number": 1})
    assert lines.close() == ""
    assert [row["number"] for row in read_rows(tmp_path / "run" / "log")] == [0, 1]


@pytest.mark.parametrize("operation", ["flush", "write"])
def test_process_that_lost_its_lease_writes_nothing_at_the_next_flush(
    tmp_path: Path, operation: str
) -> None:
    run = DiskStorage(tmp_path)
    lease = claim(run, actor="a")
    lines = LineFile(tmp_path / "log", lease.check_now)
    lines.write({"number": 0})
    with limit_file_size(1):
        lines.write({"number": 1})
    assert lines.num_waiting == 1
    claim(run, actor="a")
    with pytest.raises(LeaseLost):
        lines.flush() if operation == "flush" else lines.write({"number": 2})
    assert lines.num_waiting == 0 and lines.close() == ""
    assert [row["number"] for row in read_rows(tmp_path / "log")] == [0]


def test_process_stopped_before_truncating_truncates_no_newer_line(
    tmp_path: Path,
) -> None:
    """The newer process waits until the older one continues or ends."""
    (tmp_path / "log").write_bytes(b'{"number": 0}\n{"num')
    is_stopped, may_continue = threading.Event(), threading.Event()
    opened: list[LineFile] = []

    def check() -> None:
        is_stopped.set()
        assert may_continue.wait(20.0)

    def open_and_write() -> None:
        opened.append(LineFile(tmp_path / "log"))
        opened[-1].write({"number": 1})

    older = threading.Thread(target=lambda: opened.append(LineFile(tmp_path / "log", check)))
    older.start()
    assert is_stopped.wait(20.0)
    newer = threading.Thread(target=open_and_write)
    newer.start()
    newer.join(0.3)
    assert newer.is_alive(), "the newer process has not waited"
    may_continue.set()
    for thread in (older, newer):
        thread.join()
    assert [row["number"] for row in read_rows(tmp_path / "log")] == [0, 1]
    assert [lines.close() for lines in opened] == ["", ""]
