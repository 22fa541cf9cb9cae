"""Epochs in the lines of a log file, so that readers skip lines of a former lease owner.

A process that is stopped between checking its lease and writing appends a line after those of the
newer owner. A disk cannot prevent that, so readers skip each line that comes after a line of a
newer epoch. Such a line is stale. A process checks its lease before each line, so each older epoch
has few stale lines.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

NUM_SURE = 32
"""So many lines of one epoch cannot all be stale: no newer epoch comes before the first of them."""
_EPOCH = re.compile(rb', "epoch": (\d+)\}\n')


def line_of(row: dict[str, Any], epoch: int | None) -> bytes:
    """A row as a line, which ends with its writer's epoch if there is one."""
    fields = row if epoch is None else {**row, "epoch": epoch}
    return json.dumps(fields, allow_nan=False).encode() + b"\n"


def has_epochs(lines: bytes) -> bool:
    """Whether any of these lines has an epoch."""
    return _EPOCH.search(lines) is not None


def newest_epoch(lines_from_end: Iterable[bytes]) -> int:
    """The newest epoch of a file, given its lines, newest first; 0 if no line has an epoch."""
    seen: Counter[int | None] = Counter()
    for line in lines_from_end:
        epoch = _epoch_of(line)
        seen[epoch] += 1
        if seen[epoch] >= NUM_SURE:
            break
    return max((epoch for epoch in seen if epoch is not None), default=0)


def first_in_force(lines: bytes, newest: int) -> tuple[int, bytes, int]:
    """Split whole lines at stale ones; `newest` is the newest epoch before them.

    Returns the number of bytes of stale lines at the beginning, the lines up to the next stale one,
    and their newest epoch.
    """
    skipped = 0
    for match in _EPOCH.finditer(lines):
        epoch = int(match[1])
        if epoch >= newest:
            newest = epoch
            continue
        begin = lines.rfind(b"\n", 0, match.start()) + 1
        if begin > skipped:
            return skipped, lines[skipped:begin], newest
        skipped = match.end()
    return skipped, lines[skipped:], newest


def in_force_from_end(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Filter out stale lines, newest line first.

    A line is yielded once it is known that no newer epoch comes before it in the file.
    """
    waiting: deque[tuple[int, bytes, int | None]] = deque()
    seen: Counter[int | None] = Counter()
    for offset, line in lines:
        epoch = _epoch_of(line)
        if epoch is not None and any(e is not None and e < epoch for _, _, e in waiting):
            waiting = deque(entry for entry in waiting if entry[2] is None or entry[2] >= epoch)
            seen = Counter(entry[2] for entry in waiting)
        waiting.append((offset, line, epoch))
        seen[epoch] += 1
        while waiting and seen[epoch] >= NUM_SURE:
            first = waiting.popleft()
            seen[first[2]] -= 1
            yield first[0], first[1]
    for offset, line, _ in waiting:
        yield offset, line


def _epoch_of(line: bytes) -> int | None:
    match = _EPOCH.search(line if line.endswith(b"\n") else line[-64:] + b"\n")
    return int(match[1]) if match else None
