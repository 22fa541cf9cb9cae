"""Two or three writers of one log, in any order of appending, shipping, claiming and closing.

What was acknowledged under the newest epoch is readable, in order, once; and what a writer has read
when it took over stays the beginning of the log, whatever an older one still writes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from memory_storage import MemoryStorage

from actors.errors import LeaseLost
from actors.lease import Lease, claim
from actors.line_writers import LineFile, SegmentWriter
from actors.lines import LineLog
from actors.storage import DiskStorage

WHICH = st.sampled_from([0, 0, 0, 1, 2])
"""Which process, the newest first."""
RARELY = st.sampled_from([False, False, False, True])


class SlowStorage(MemoryStorage):
    """A write may be refused, or come about at any later time although its writer saw it fail; and
    another process may act just before a write."""

    def __init__(self) -> None:
        super().__init__()
        self.before_write: Callable[[], None] | None = None
        self.is_slow = False
        self.under_way: list[tuple[str, bytes]] = []

    def write(self, name: str, data: bytes) -> None:
        act, self.before_write = self.before_write, None
        if act:
            act()
        if self.is_slow and name.startswith("journal"):
            self.under_way.append((name, bytes(data)))
            raise OSError(110, "Connection timed out")
        super().write(name, data)


@dataclass
class Process:
    """A controller: its lease, its log, and the numbers that it has appended."""

    lease: Lease
    writer: SegmentWriter
    seen: list[int]
    appended: list[int] = field(default_factory=list)
    num_acknowledged: int = 0


class SegmentsOfManyWriters(RuleBasedStateMachine):
    """On an object store."""

    def __init__(self) -> None:
        super().__init__()
        self.storage: Any = SlowStorage()
        self.log = LineLog(self.storage, "journal.jsonl")
        self.processes: list[Process] = []
        self.acknowledged: list[int] = []
        self.number = 0

    def numbers(self) -> list[int]:
        return [row["number"] for row in self.log.lines()]

    @rule(really=RARELY, lands=st.booleans())
    def sometimes_take_over(self, really: bool, lands: bool) -> None:
        if really:
            self.take_over(lands)

    def take_over(self, lands: bool = False) -> None:
        """As the same actor: no process need have let go. A write of an older one may come about
        while the new one opens the log."""
        lease = claim(self.storage, actor="controller")
        writer = SegmentWriter(self.log, lease.epoch, lease.look, segment_bytes=60)
        if lands:
            self.land(0)
        self.processes.append(Process(lease, writer, self.numbers()))

    @initialize()
    def first(self) -> None:
        self.take_over()

    @rule(which=st.integers(0, 3))
    def land(self, which: int) -> None:
        if under_way := self.storage.under_way:
            name, data = under_way.pop(which % len(under_way))
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
            process.writer.append({"number": self.number})
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
        """What has been shipped is acknowledged if the lease is still held afterwards."""
        try:
            with suppress(OSError):
                process.writer.ship()
            num = len(process.appended) - process.writer.num_waiting
            process.lease.look()
        except LeaseLost:
            return
        self.acknowledged += process.appended[process.num_acknowledged : num]
        process.num_acknowledged = num

    @rule(really=RARELY, which=WHICH)
    def close(self, really: bool, which: int) -> None:
        """A process that has lost its lease writes nothing at its end."""
        if not self.processes or not really:
            return
        process = self.processes.pop(which % len(self.processes))
        before = dict(self.storage.objects)
        is_newest = all(process.lease.epoch > other.lease.epoch for other in self.processes)
        self.ship(process)
        process.lease.release()
        assert is_newest or self.storage.objects == before

    @invariant()
    def history_only_grows(self) -> None:
        numbers, acknowledged = self.numbers(), set(self.acknowledged)
        assert len(set(numbers)) == len(numbers)
        assert [n for n in numbers if n in acknowledged] == self.acknowledged
        for process in self.processes:
            assert numbers[: len(process.seen)] == process.seen


class FileOfManyWriters(RuleBasedStateMachine):
    """On a disk: a process looks at its lease before it writes a line."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="elastic-log-laws-")
        self.run_ = DiskStorage(Path(self.folder))
        self.processes: list[tuple[Lease, LineFile]] = []
        self.acknowledged: list[int] = []

    def teardown(self) -> None:
        for _, file in self.processes:
            file.close()
        shutil.rmtree(self.folder)

    @rule(half=st.booleans())
    def take_over(self, half: bool) -> None:
        """The one before may have died in the middle of a line."""
        if half and self.acknowledged:
            with open(self.run_.path / "journal.jsonl", "ab") as file:
                file.write(b'{"number": ')
        lease = claim(self.run_, actor="controller")
        file = LineFile(self.run_.path / "journal.jsonl", lease.look)
        self.processes.append((lease, file))

    @rule(which=WHICH)
    def append(self, which: int) -> None:
        if not self.processes:
            return
        lease, file = self.processes[-1 - which % len(self.processes)]
        with suppress(LeaseLost):
            lease.check()
            self.acknowledged.append(len(self.acknowledged))
            file.write({"number": self.acknowledged[-1]})

    @rule(which=WHICH)
    def close(self, which: int) -> None:
        if self.processes:
            lease, file = self.processes.pop(which % len(self.processes))
            assert file.close() == ""
            lease.release()

    @invariant()
    def all_is_there(self) -> None:
        journal = self.run_.path / "journal.jsonl"
        text = journal.read_bytes() if journal.exists() else b""
        whole = text[: text.rfind(b"\n") + 1].splitlines()
        assert [json.loads(line)["number"] for line in whole] == self.acknowledged


SegmentsOfManyWriters.TestCase.settings = settings(max_examples=250, deadline=None)
FileOfManyWriters.TestCase.settings = settings(max_examples=30, deadline=None)
TestSegmentsOfManyWriters = SegmentsOfManyWriters.TestCase
TestFileOfManyWriters = FileOfManyWriters.TestCase
