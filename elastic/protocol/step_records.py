"""Step records that a worker keeps while its controller is down, in compact and bounded form."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from struct import Struct

from elastic.protocol.votes import SPLIT, StepRecord, Vote

NUM_KEPT_RECORDS = 1 << 17
"""About 16 MB when full; steps of 1 s fill it in 36 hours."""
NUM_KEPT_REPORTS = 1 << 13
"""A script's own numbers are kept for fewer steps: a record may have many of them."""
NUM_SENT_RECORDS = 1024
"""Most records in the answer to one request."""
NUM_REPORTED_RECORDS = 64
"""Most records in the report of a worker that unwinds; if more are lacking, it reports none."""
RECORDS_PER_BLOCK = 1024

_PACKED = Struct("<dqqqqddddddddddB")
_NULLABLE = ("loss", "tokens", "lr", "grad_norm", "step_s")
_SKIPPED, _MISSING, _NO_SPLIT, _FIRST_NULL = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class RecordsSent:
    """A worker answers `SendRecords` with its oldest records of the requested steps.

    `vote` is the latest vote that it has read; it is not older than the last of the records.
    """

    worker: str
    generation: int
    records: tuple[StepRecord, ...]
    vote: Vote | None = None


class RecordRing:
    """A ring of the records of consecutive steps that drops the oldest; not thread-safe."""

    def __init__(self, capacity: int = NUM_KEPT_RECORDS) -> None:
        """`capacity` is the least number of records kept before the oldest are dropped."""
        self._records_per_block = min(RECORDS_PER_BLOCK, capacity)
        self._num_blocks = -(-capacity // self._records_per_block) + 1
        self._blocks: deque[bytearray] = deque()
        self._first_step = 0
        self._num_records = 0
        self._reported: dict[int, dict[str, float | None]] = {}
        """By step, in ascending order; most runs report nothing."""

    def __len__(self) -> int:
        return self._num_records

    @property
    def last_step(self) -> int:
        """The newest step with a record; if there is none, the step before the first to come."""
        return self._first_step + self._num_records - 1

    def append(self, record: StepRecord) -> None:
        """Add the next step's record; a recomputed step replaces its old record and all later."""
        if record.step <= self.last_step:
            self.truncate(record.step - 1)
        if record.step != self.last_step + 1:
            self.clear()
        if not self._num_records:
            self._first_step = record.step
        packed_block_bytes = self._records_per_block * _PACKED.size
        if not self._blocks or len(self._blocks[-1]) == packed_block_bytes:
            self._blocks.append(bytearray())
        self._blocks[-1] += _pack(record)
        self._num_records += 1
        if record.reported:
            self._reported[record.step] = record.reported
            self._drop_reports(record.step - NUM_KEPT_REPORTS + 1)
        if len(self._blocks) > self._num_blocks:
            self._blocks.popleft()
            self._first_step += self._records_per_block
            self._num_records -= self._records_per_block
            self._drop_reports(self._first_step)

    def _drop_reports(self, first_step: int) -> None:
        """Drop what was reported of the steps before `first_step`."""
        while self._reported and (oldest := next(iter(self._reported))) < first_step:
            del self._reported[oldest]

    def after(self, step: int, limit: int = NUM_SENT_RECORDS) -> tuple[StepRecord, ...]:
        """The records of the steps after `step`, oldest first, at most `limit`."""
        first = max(step + 1, self._first_step)
        last = min(self.last_step, first + limit - 1)
        return tuple(self._get(number - self._first_step) for number in range(first, last + 1))

    def truncate(self, step: int) -> None:
        """Drop the records of the steps after `step`."""
        num_kept = max(0, min(self._num_records, step - self._first_step + 1))
        num_blocks = -(-num_kept // self._records_per_block)
        while len(self._blocks) > num_blocks:
            self._blocks.pop()
        if num_blocks:
            num_in_last = num_kept - (num_blocks - 1) * self._records_per_block
            del self._blocks[-1][num_in_last * _PACKED.size :]
        self._num_records = num_kept
        while self._reported and next(reversed(self._reported)) > step:
            self._reported.popitem()

    def clear(self) -> None:
        self.truncate(self._first_step - 1)

    def _get(self, index: int) -> StepRecord:
        block, offset = divmod(index, self._records_per_block)
        record = _unpack(self._blocks[block], offset * _PACKED.size)
        reported = self._reported.get(record.step)
        return replace(record, reported=reported) if reported else record


def _pack(record: StepRecord) -> bytes:
    flags = _SKIPPED * record.skipped + _MISSING * record.missing
    flags += _NO_SPLIT * (record.compute_s is None)
    for position, name in enumerate(_NULLABLE):
        flags |= (getattr(record, name) is None) * _FIRST_NULL << position
    return _PACKED.pack(
        record.time,
        record.step,
        record.generation,
        record.world_size,
        record.tokens or 0,
        record.loss or 0.0,
        record.lr or 0.0,
        record.grad_norm or 0.0,
        record.step_s or 0.0,
        *(getattr(record, name) or 0.0 for name in SPLIT),
        flags,
    )


def _unpack(block: bytearray, offset: int) -> StepRecord:
    time, step, generation, world_size, tokens, *numbers, flags = _PACKED.unpack_from(block, offset)
    loss, lr, grad_norm, step_s, *split = numbers
    values = {"loss": loss, "tokens": tokens, "lr": lr, "grad_norm": grad_norm, "step_s": step_s}
    for position, name in enumerate(_NULLABLE):
        if flags & _FIRST_NULL << position:
            values[name] = None
    values |= {"skipped": bool(flags & _SKIPPED), "missing": bool(flags & _MISSING)}
    if not flags & _NO_SPLIT:
        values |= dict(zip(SPLIT, split, strict=True))
    return StepRecord(time, step, generation, world_size, **values)
