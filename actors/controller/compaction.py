"""Old segments of a run's logs on an object store: joined, and those of the journal made smaller.

A log of millions of steps would be thousands of objects. The metrics are joined byte for byte. In
the journal, lines of steps and full states become lines that say only how far the run had come, and
the lines in `DROPPED`, of which there are as many as steps or workers, are removed; other events
and commands stay. Nothing is touched that a replay may need, nor the newest segments, so
that readers that follow a run do not notice. On a disk a log is one file, and stays as it is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from actors.controller.journal import MARKER
from actors.storage.errors import LeaseLost
from actors.storage.line_logs import LineLog, parse_line
from actors.storage.segments import LogSegment
from elastic.protocol.wire import is_progress, is_steps, progress_line

LOOK_EVERY_S = 600.0
NUM_JOINED = 16
"""So many segments become one."""
NUM_LEFT = 16
"""So many of the newest stay as they are."""
DROPPED = {"ComputeTimed", "Progressed", "Woke", "PartWritten", "PublishCheckpoint"}
"""Events and commands that only a replay needs: `Checkpointed` tells of the checkpoint itself."""
RECORD_FIELDS = ("generation", "step", "step_s")
"""What readers need of the records in `RecordsSent`."""


class Compactor:
    """Looks now and then, in a thread of its own, whether there is anything to compact."""

    def __init__(
        self,
        journal: LineLog,
        others: tuple[LineLog, ...],
        check: Callable[[], None],
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        """`check` raises `LeaseLost` once this process may not write any more."""
        self._journal = journal
        self._others = others
        self._check = check
        self._every_s = every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="compaction", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What is under way is still done."""
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                for log in (self._journal, *self._others):
                    while not self._closed.is_set() and self._compact_once(log):
                        continue
            except LeaseLost:
                return  # the shell sees the same, and ends
            except Exception:  # mostly OSError: storage does not answer; any other likewise
                continue  # nothing is lost, and the next look tries it again: there is time

    def _compact_once(self, log: LineLog) -> bool:
        return compact_oldest(log, self._check, is_journal=log is self._journal)


def compact_oldest(
    log: LineLog,
    check: Callable[[], None],
    is_journal: bool,
    num_joined: int = NUM_JOINED,
    num_left: int = NUM_LEFT,
) -> bool:
    """Let one segment stand for the `num_joined` oldest that are left; whether there were so many.

    Raises OSError, or `LeaseLost`; in either case nothing is lost.
    """
    leftovers = _superseded(log)
    if leftovers:
        check()
        log.remove_segments(leftovers)
    segments = _oldest_uncompacted(log.segments(), num_joined, num_left)
    if len(segments) < num_joined:
        return False
    if is_journal and (log.find_newest(MARKER) or 0) < segments[-1].end:
        return False
    lines = b"".join(
        log.storage.read(segment.name, 0, segment.end - segment.begin) for segment in segments
    )
    check()
    log.compact(segments, shrink_journal(lines) if is_journal else lines)
    check()
    log.remove_segments(segments)
    return True


def shrink_journal(lines: bytes) -> bytes:
    """Without what only a replay needs."""
    kept: list[bytes] = []
    dropped: dict[str, Any] | None = None
    for line in lines.split(b"\n")[:-1]:
        row = parse_line(line)
        name = "" if row is None else row.get("event") or row.get("command") or ""
        if row is not None and name in DROPPED:
            dropped = row
            continue
        if dropped and (row is None or name == "RunOpened"):
            kept.append(_time_line(dropped))
        dropped = None
        kept.append(line + b"\n" if row is None else _shrunk(row, name, line))
    if dropped:
        kept.append(_time_line(dropped))
    return b"".join(kept)


def _shrunk(row: dict[str, Any], name: str, line: bytes) -> bytes:
    if is_steps(row) or is_progress(row):
        row = progress_line(row)
    elif name == "RecordsSent":
        records = [{field: record[field] for field in RECORD_FIELDS} for record in row["records"]]
        row = {**row, "records": records, "vote": None}
    else:
        return line + b"\n"
    return json.dumps(row).encode() + b"\n"


def _time_line(row: Mapping[str, Any]) -> bytes:
    """What stands for the last line of a session, or perhaps of one: readers take its time for the
    end of the session."""
    told = {name: row[name] for name in ("time", "generation", "format")}
    return json.dumps(told).encode() + b"\n"


def _oldest_uncompacted(
    segments: list[LogSegment], num_joined: int, num_left: int
) -> list[LogSegment]:
    """Whole objects that lie one after the other, and were not joined or compacted before."""
    found: list[LogSegment] = []
    for segment in segments[: max(0, len(segments) - num_left)]:
        follows = not found or found[-1].end == segment.begin
        if segment.is_joined or segment.begin != segment.object_begin or not follows:
            found = []
            continue
        found.append(segment)
        if len(found) == num_joined:
            return found
    return []


def _superseded(log: LineLog) -> list[LogSegment]:
    """What an interrupted compaction has left: objects within a joined one that is in force."""
    joined = [segment for segment in log.segments() if segment.is_joined]
    names = {segment.name for segment in joined}
    return [
        segment
        for segment in (log.all_segments() if joined else ())
        if segment.name not in names
        and any(one.begin <= segment.begin and segment.end <= one.end for one in joined)
    ]
