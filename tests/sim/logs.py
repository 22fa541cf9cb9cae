"""Simulated logs and lease: what survives a controller, and what is lost with it.

A line is durable `LAG_S` after it was written, or once `make_durable` has returned. A controller
that dies loses some of its newest lines that are not durable, as with the disk of its machine.
Lines become JSON when another controller is to read them, which then reads them as from an object
store.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from random import Random
from typing import Any, get_args

from memory_storage import MemoryStorage

from actors.storage.errors import LeaseLost
from actors.storage.lease import Lease
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import CLOSE_PATIENCE_S, RETRY_EVERY_S, SegmentWriter
from elastic.protocol.commands import Command

LAG_S = 1.0
Line = dict[str, Any]
CommandKey = tuple[str, int | None, int | None, str]
"""Class, generation, step, and worker or node of a command, as far as it has them."""
NUMBERS = ("generation", "step")
FIELDS = {kind.__name__: {field.name for field in fields(kind)} for kind in get_args(Command)}


def key_of(command: Command) -> CommandKey:
    subject = getattr(command, "worker", "") or getattr(command, "node", "")
    generation, step = (getattr(command, name, None) for name in NUMBERS)
    return type(command).__name__, generation, step, subject


def _key_in(line: Line) -> CommandKey:
    name = line["command"]
    generation, step = (line[n] if n in FIELDS[name] else None for n in NUMBERS)
    return name, generation, step, line.get("worker") or line.get("node") or ""


class SimLog:
    """One log of a run, over all its controllers."""

    def __init__(self, storage: MemoryStorage, name: str, is_kept: bool) -> None:
        """Unless `is_kept`, nothing will ever read it."""
        self.lines: list[Line] = []
        self.newest_epoch = 0
        """The newest claim of the run's lease."""
        self._writer_epoch = 0
        self.refuses_until = 0.0
        """Until this time, storage accepts no line."""
        self._log = LineLog(storage, name)
        self._is_kept = is_kept
        self._written_at: deque[float] = deque()
        """When the newest lines were written; older ones are durable."""
        self._unsafe: set[CommandKey] = set()
        """The decided commands whose lines `make_durable` has not covered."""
        self._covered: list[CommandKey] = []
        """The commands whose lines the next `make_durable` covers."""
        self._num_readable = 0

    def append(self, line: Line, epoch: int, now: float) -> None:
        assert epoch == self.newest_epoch, "invariant 11: a line is written after the lease is lost"
        self._written_at.append(now)
        if "command" in line:
            self._covered.append(_key_in(line))
        if self._is_kept:
            self.lines.append(line)

    def expect(self, keys: Iterable[CommandKey]) -> None:
        """These commands are decided: their lines must be durable before their execution."""
        self._unsafe.update(keys)

    def check_durable(self, key: CommandKey) -> None:
        assert key not in self._unsafe, f"{key} is executed before its line is durable"

    def num_in_flight(self, now: float) -> int:
        """How many of the newest lines are not durable."""
        while self._written_at and self._written_at[0] + LAG_S <= now:
            self._written_at.popleft()
        return len(self._written_at)

    def make_durable(self) -> None:
        self._written_at.clear()
        self._unsafe.difference_update(self._covered)
        self._covered.clear()

    def end_writer(self, random: Random, now: float) -> None:
        """The writer is gone, and with it some of the newest lines that are not durable."""
        num_lost = random.randint(0, self.num_in_flight(now))
        del self.lines[len(self.lines) - num_lost :]
        self._written_at.clear()
        self._covered.clear()
        read = (line for line in self.lines if "command" in line)  # by the next controller
        self._unsafe.difference_update(map(_key_in, read))

    def begin_writer(self, epoch: int) -> None:
        """Another controller begins: `LineLog` reads the lines of the one before it."""
        writer = SegmentWriter(self._log, self._writer_epoch)
        for line in self.lines[self._num_readable :]:
            writer.append(line)
        writer.ship()
        self._num_readable = len(self.lines)
        self._written_at.clear()  # what was read is in storage
        self._writer_epoch = self.newest_epoch = epoch

    def refuses(self, now: float) -> bool:
        """Whether storage accepts no line now."""
        return now < self.refuses_until

    def texts(self) -> list[str]:
        """The lines as JSON."""
        return [json.dumps(line, allow_nan=False) for line in self.lines]


@dataclass(frozen=True)
class WriterHooks:
    """What a writer needs of its process; the hooks may let it die."""

    clock: Callable[[], float]
    sleep: Callable[[float], None]
    is_dead: Callable[[], bool]
    before_line: Callable[[], None]
    before_durable: Callable[[], None]


class SimLines:
    """One controller's writer of a log, as `LineFile` of `actors.storage.line_writers`."""

    def __init__(self, log: SimLog, lease: Lease, hooks: WriterHooks) -> None:
        self.trouble = ""
        self._log = log
        self._lease = lease
        self._hooks = hooks
        self._pending: deque[Line] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._pending) + self._log.num_in_flight(self._hooks.clock())

    def write(self, line: Line) -> None:
        self._hooks.before_line()
        self._pending.append(line)
        self.flush()

    def flush(self) -> None:
        now = self._hooks.clock()
        try:
            while self._pending:
                self._lease.check()
                if self._log.refuses(now):
                    self.trouble = "no space left on device"
                    return
                self._log.append(self._pending.popleft(), self._lease.epoch, now)
        except LeaseLost:
            self._pending.clear()
            raise
        self.trouble = ""

    def make_durable(self) -> None:
        self._hooks.before_durable()
        if not self._log.refuses(self._hooks.clock()):
            self._log.make_durable()

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> str:
        if self._hooks.is_dead():
            return ""
        deadline = self._hooks.clock() + patience_s
        try:
            self.flush()
            while self._pending and self._hooks.clock() < deadline:
                self._hooks.sleep(RETRY_EVERY_S)
                self.flush()
        except LeaseLost:
            pass  # `flush` has dropped the waiting lines: readers would ignore them
        return f"{len(self._pending)} lines not written" if self._pending else ""


class SimLease(Lease):
    """One controller's lease, as on a disk: each check looks at the newest claim."""

    def __init__(self, epoch: int, since: int, newest_epoch: Callable[[], int]) -> None:
        super().__init__(MemoryStorage(), epoch, f"lease/{epoch}", {}, since)
        self._newest_epoch = newest_epoch

    def check(self) -> None:
        self.check_now()

    def check_now(self) -> None:
        if self._newest_epoch() > self.epoch:
            raise LeaseLost(f"the lease of epoch {self.epoch} was taken over")

    def start_renewing(self, every_s: float = 0.0) -> None:
        """Nothing: no claimant waits for a lease to expire."""
