"""Laws of a log with several writers, in any order of appends, uploads, claims and closes.

Every line acknowledged under the newest epoch is readable once, in order. The lines that a writer
read when it took over remain the start of the log, whatever an older writer still writes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from memory_storage import MemoryStorage

from actors.controller.compaction import compact_oldest
from actors.controller.journal import open_journal
from actors.storage.errors import LeaseLost
from actors.storage.lease import Lease, claim
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import SegmentWriter
from actors.storage.storage import DiskStorage

WHICH = st.sampled_from([0, 0, 0, 1, 2])
"""The index of a process, newest first."""
RARELY = st.sampled_from([False, False, False, True])


LINE = {"time": 0.0, "generation": 0, "filler": "ControllerState"}
"""A line that survives compaction, and after which the log may be compacted."""
SEGMENT_BYTES = 80


class SlowStorage(MemoryStorage):
    """Storage that may refuse a write, or execute it later although the write seemed to fail.

    Another process may act just before a write or a removal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before_write: Callable[[], None] | None = None
        self.before_remove: Callable[[], None] | None = None
        self.is_slow = False
        self.delayed_writes: list[tuple[str, bytes]] = []

    def write(self, name: str, data: bytes) -> None:
        before, self.before_write = self.before_write, None
        if before:
            before()
        if self.is_slow and name.startswith("journal"):
            self.delayed_writes.append((name, bytes(data)))
            raise OSError(110, "Connection timed out")
        super().write(name, data)

    def remove(self, name: str) -> None:
        before = self.before_remove if name.startswith("journal") else None
        if before:
            self.before_remove = None
            before()
        super().remove(name)


@dataclass
class Process:
    """A controller: its lease, its log, and the numbers that it has appended."""

    lease: Lease
    writer: SegmentWriter
    seen: list[int]
    appended: list[int] = field(default_factory=list)
    num_acknowledged: int = 0


class SegmentsOfManyWriters(RuleBasedStateMachine):
    """A log of segments on an object store."""

    def __init__(self) -> None:
        super().__init__()
        self.storage: Any = SlowStorage()
        self.log = LineLog(self.storage, "journal.jsonl")
        self.processes: list[Process] = []
        self.acknowledged: list[int] = []
        self.number = 0

    def numbers(self) -> list[int]:
        return [row["step"] for row in self.log.lines()]

    @rule(really=RARELY, delayed_write_lands=st.booleans())
    def sometimes_take_over(self, really: bool, delayed_write_lands: bool) -> None:
        if really:
            self.take_over(delayed_write_lands)

    def take_over(self, delayed_write_lands: bool = False) -> None:
        """Take over as the same actor, which does not require a released lease.

        A delayed write of an older process may land while the new one opens the log.
        """
        lease = claim(self.storage, actor="controller")
        writer = SegmentWriter(self.log, lease.epoch, lease.check_now, segment_bytes=SEGMENT_BYTES)
        if delayed_write_lands:
            self.land_delayed_write(0)
        self.processes.append(Process(lease, writer, self.numbers()))

    @initialize()
    def first(self) -> None:
        self.take_over()

    @rule(which=st.integers(0, 3))
    def land_delayed_write(self, which: int) -> None:
        if delayed_writes := self.storage.delayed_writes:
            name, data = delayed_writes.pop(which % len(delayed_writes))
            MemoryStorage.write(self.storage, name, data)

    @rule(
        which=WHICH,
        num=st.integers(0, 7),
        is_overtaken=RARELY,
        fails=st.sampled_from(["", "", "refused", "slow"]),
    )
    def append_and_ship(self, which: int, num: int, is_overtaken: bool, fails: str) -> None:
        if not self.processes:
            return
        process = self.processes[-1 - which % len(self.processes)]
        for _ in range(num):
            self.number += 1
            process.writer.append({**LINE, "step": self.number})
            process.appended.append(self.number)
        if is_overtaken:
            self.storage.before_write = self.take_over
        elif fails == "refused":
            self.storage.refusal = OSError(28, "No space left on device")
        self.storage.is_slow = fails == "slow" and not is_overtaken
        self.ship(process)
        self.storage.before_write, self.storage.refusal = None, None
        self.storage.is_slow = False

    def ship(self, process: Process) -> None:
        """Ship; the shipped lines are acknowledged if the lease is still held afterwards."""
        try:
            with suppress(OSError):
                process.writer.ship()
            num = len(process.appended) - process.writer.num_waiting
            process.lease.check_now()
        except LeaseLost:
            return
        self.acknowledged += process.appended[process.num_acknowledged : num]
        process.num_acknowledged = num

    @rule(
        which=WHICH,
        is_journal=st.booleans(),
        overtaken=st.sampled_from(["", "", "before a write", "before a removal"]),
        fails=st.sampled_from(["", "", "refused", "slow"]),
    )
    def compact(self, which: int, is_journal: bool, overtaken: str, fails: str) -> None:
        """Compact by any process, as its compaction thread does, even if it has lost its lease."""
        if not self.processes:
            return
        process = self.processes[-1 - which % len(self.processes)]
        before = self.numbers()
        if overtaken == "before a write":
            self.storage.before_write = self.take_over
        elif overtaken:
            self.storage.before_remove = self.take_over
        elif fails == "refused":
            self.storage.refusal = OSError(28, "No space left on device")
        self.storage.is_slow = fails == "slow" and not overtaken
        with suppress(LeaseLost, OSError):
            compact_oldest(self.log, process.lease.check_now, is_journal, num_joined=2, num_left=1)
        self.storage.before_write = self.storage.before_remove = self.storage.refusal = None
        self.storage.is_slow = False
        assert self.numbers() == before

    @rule(really=RARELY, which=WHICH)
    def close(self, really: bool, which: int) -> None:
        """Close a process; one that has lost its lease writes nothing."""
        if not self.processes or not really:
            return
        process = self.processes.pop(which % len(self.processes))
        before = dict(self.storage.objects)
        is_newest = all(process.lease.epoch > other.lease.epoch for other in self.processes)
        self.ship(process)
        process.lease.release()
        assert is_newest or self.storage.objects == before

    @invariant()
    def acknowledged_lines_stay(self) -> None:
        numbers, acknowledged = self.numbers(), set(self.acknowledged)
        assert len(set(numbers)) == len(numbers)
        assert [n for n in numbers if n in acknowledged] == self.acknowledged
        for process in self.processes:
            assert numbers[: len(process.seen)] == process.seen


@dataclass
class FileProcess:
    """A controller that can be stopped right after it has checked its lease."""

    lease: Lease
    file: Any = None
    seen: list[int] = field(default_factory=list)
    stopped: threading.Thread | None = None
    is_stopped: threading.Event = field(default_factory=threading.Event)
    may_continue: threading.Event = field(default_factory=threading.Event)

    @property
    def epoch(self) -> int:
        return self.lease.epoch

    def check_now(self) -> None:
        self.lease.check_now()
        if threading.current_thread() is self.stopped:
            self.is_stopped.set()
            self.may_continue.wait()

    def continue_writing(self) -> None:
        if self.stopped is not None:
            self.may_continue.set()
            self.stopped.join()
            self.stopped = None


class FileOfManyWriters(RuleBasedStateMachine):
    """A log file on a disk: a process checks its lease before it writes a line.

    It may be stopped between the two until one or several newer processes have taken over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="elastic-log-laws-")
        self.run_ = DiskStorage(Path(self.folder))
        self.log = LineLog(self.run_, "journal.jsonl")
        self.reader = self.log.reader()
        self.followed: list[int] = []
        self.processes: list[FileProcess] = []
        self.acknowledged: list[int] = []
        self.number = 0
        self.epochs: dict[int, int] = {}

    def teardown(self) -> None:
        for process in self.processes:
            process.continue_writing()
            process.file.close()
        shutil.rmtree(self.folder)

    @initialize()
    def first(self) -> None:
        self.take_over(False)

    @rule(half=st.booleans())
    def take_over(self, half: bool) -> None:
        """Take over; the previous process may have died in the middle of a line."""
        if half and self.number:
            with open(self.run_.path / "journal.jsonl", "ab") as file:
                file.write(b'{"number": ')
        process = FileProcess(claim(self.run_, actor="controller"))
        process.file = open_journal(self.log, process)
        process.seen = self.numbers()
        self.processes.append(process)

    @rule(which=WHICH)
    def append(self, which: int) -> None:
        if free := [process for process in self.processes if process.stopped is None]:
            self.write(free[-1 - which % len(free)])

    def write(self, process: FileProcess) -> None:
        """Write a line; it is acknowledged if the lease is still held afterwards."""
        self.number += 1
        number = self.number
        self.epochs[number] = process.epoch
        with suppress(LeaseLost):
            process.file.write({"number": number, "time": 0.0})
            process.lease.check_now()
            self.acknowledged.append(number)

    @rule(which=WHICH)
    def stop_before_a_write(self, which: int) -> None:
        """Stop a process between the check of its lease and its write, until `continue_writing`."""
        if free := [process for process in self.processes if process.stopped is None]:
            process = free[-1 - which % len(free)]
            process.stopped = threading.Thread(target=self.write, args=(process,))
            process.may_continue.clear()
            process.is_stopped.clear()
            process.stopped.start()
            while process.stopped.is_alive() and not process.is_stopped.wait(0.001):
                continue

    @rule(which=WHICH)
    def continue_writing(self, which: int) -> None:
        if stopped := [process for process in self.processes if process.stopped is not None]:
            stopped[-1 - which % len(stopped)].continue_writing()

    @rule(which=WHICH)
    def close(self, which: int) -> None:
        if self.processes:
            process = self.processes.pop(which % len(self.processes))
            process.continue_writing()
            assert process.file.close() == ""
            process.lease.release()

    def numbers(self) -> list[int]:
        return [row["number"] for row in self.log.lines() if "number" in row]

    @invariant()
    def acknowledged_lines_stay(self) -> None:
        numbers, acknowledged = self.numbers(), set(self.acknowledged)
        assert [n for n in numbers if n in acknowledged] == self.acknowledged
        for process in self.processes:
            num_seen = len(process.seen)
            assert numbers[:num_seen] == process.seen
            later = [self.epochs[number] for number in numbers[num_seen:]]
            assert not later or min(later) >= process.epoch, (
                "the process has missed an older valid line"
            )
        while block := self.reader.read():
            self.followed += numbers_in(block)
        assert self.followed == numbers, "a reader that follows the log sees the same lines"
        from_end = b"".join(line + b"\n" for _, line in self.log.lines_from_end())
        assert numbers_in(from_end) == numbers[::-1], "so does a reader that starts at the end"
        for offset, row in self.log.lines_with_offsets():
            assert next(self.log.lines(offset)) == row, "so does a reader that starts at an offset"


def numbers_in(lines: bytes) -> list[int]:
    rows = [json.loads(line) for line in lines.splitlines()]
    return [row["number"] for row in rows if "number" in row]


SegmentsOfManyWriters.TestCase.settings = settings(max_examples=250, deadline=None)
FileOfManyWriters.TestCase.settings = settings(max_examples=30, deadline=None)
TestSegmentsOfManyWriters = SegmentsOfManyWriters.TestCase
TestFileOfManyWriters = FileOfManyWriters.TestCase
