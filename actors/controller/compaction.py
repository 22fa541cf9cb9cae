"""Log compaction on an object store: old segments are joined, and those of the journal shrunk.

Without it, a log of millions of steps would be thousands of objects. Metrics are joined byte for
byte. In the journal, lines of steps and full states become lines that give only the progress of the
run. The lines in `DROPPED`, as many as steps or workers, are removed; other events and commands
stay. Compaction leaves alone whatever a replay may need, and the newest segments, so that readers
that follow a run do not notice it. On a disk a log is one file, which is never compacted.
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
"""The number of segments that become one."""
NUM_LEFT = 16
"""The number of newest segments that are left alone."""
DROPPED = {"ComputeTimed", "Progressed", "Woke", "PartWritten", "PublishCheckpoint"}
"""Events and commands that only a replay needs; `Checkpointed` reports the checkpoint itself."""
RECORD_FIELDS = ("generation", "step", "step_s")
"""The fields that readers need of the records in `RecordsSent`."""


class Compactor:
    """Compacts the logs in a background thread whenever enough segments have gathered."""

    def __init__(
        self,
        journal: LineLog,
        others: tuple[LineLog, ...],
        check: Callable[[], None],
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        """`check` raises `LeaseLost` once this process has lost its lease."""
        self._journal = journal
        self._others = others
        self._check = check
        self._every_s = every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="compaction", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the compaction under way, then end the thread."""
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                for log in (self._journal, *self._others):
                    while not self._closed.is_set() and self._compact_once(log):
                        continue
            except LeaseLost:
                return  # the shell sees the lost lease, too, and ends the run
            except Exception:  # usually OSError: storage does not answer
                continue  # nothing is lost: try again at the next interval

    def _compact_once(self, log: LineLog) -> bool:
        return compact_oldest(log, self._check, is_journal=log is self._journal)


def compact_oldest(
    log: LineLog,
    check: Callable[[], None],
    is_journal: bool,
    num_joined: int = NUM_JOINED,
    num_left: int = NUM_LEFT,
) -> bool:
    """Replace the `num_joined` oldest uncompacted segments by one; return whether there were so
    many. Raises OSError or `LeaseLost`; in either case nothing is lost."""
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
    """The lines of a journal without what only a replay needs."""
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
    """The replacement of a dropped line that may be the last of its session: readers take its time
    as the end of the session."""
    fields = {name: row[name] for name in ("time", "generation", "format")}
    return json.dumps(fields).encode() + b"\n"


def _oldest_uncompacted(
    segments: list[LogSegment], num_joined: int, num_left: int
) -> list[LogSegment]:
    """The oldest adjacent segments that are whole objects and were never joined."""
    adjacent: list[LogSegment] = []
    for segment in segments[: max(0, len(segments) - num_left)]:
        follows = not adjacent or adjacent[-1].end == segment.begin
        if segment.is_joined or segment.begin != segment.object_begin or not follows:
            adjacent = []
            continue
        adjacent.append(segment)
        if len(adjacent) == num_joined:
            return adjacent
    return []


def _superseded(log: LineLog) -> list[LogSegment]:
    """The segments that an interrupted compaction left behind: a valid joined one covers them."""
    joined = [segment for segment in log.segments() if segment.is_joined]
    names = {segment.name for segment in joined}
    return [
        segment
        for segment in (log.all_segments() if joined else ())
        if segment.name not in names
        and any(whole.begin <= segment.begin and segment.end <= whole.end for whole in joined)
    ]
