"""Epochs in the lines of a file that several processes may append to, one after the other.

A process that is stopped between the look at its lease and the write appends a line after those of
the newer owner. Nothing on a disk prevents that, so readers leave out each line of an epoch before
which there is a line of a newer one. A process looks at its lease before each line, so of each
older epoch there are few such lines.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

NUM_SURE = 32
"""So many lines of one epoch are not all stale: before the first of them there is no newer one."""
_EPOCH = re.compile(rb', "epoch": (\d+)\}\n')


def line_of(row: dict[str, Any], epoch: int | None) -> bytes:
    """A row as a line, which ends with the epoch of its writer, if that has one."""
    told = row if epoch is None else {**row, "epoch": epoch}
    return json.dumps(told, allow_nan=False).encode() + b"\n"


def has_epochs(lines: bytes) -> bool:
    """Whether any of these lines has one."""
    return _EPOCH.search(lines) is not None


def newest_epoch(lines_from_end: Iterable[bytes]) -> int:
    """The newest epoch of a file, from its lines, the newest first; 0 if they have none."""
    seen: Counter[int | None] = Counter()
    for line in lines_from_end:
        epoch = _epoch_of(line)
        seen[epoch] += 1
        if seen[epoch] >= NUM_SURE:
            break
    return max((epoch for epoch in seen if epoch is not None), default=0)


def first_in_force(lines: bytes, newest: int) -> tuple[int, bytes, int]:
    """Of whole lines, `newest` being the newest epoch before them: the number of bytes of stale
    lines at the beginning, the lines up to the next stale one, and their newest epoch."""
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
    """Without stale ones; each is given out once it is known that no newer epoch is before it."""
    waiting: deque[tuple[int, bytes, int | None]] = deque()
    seen: Counter[int | None] = Counter()
    for offset, line in lines:
        epoch = _epoch_of(line)
        if epoch is not None and any(e is not None and e < epoch for _, _, e in waiting):
            waiting = deque(one for one in waiting if one[2] is None or one[2] >= epoch)
            seen = Counter(one[2] for one in waiting)
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
