"""The journal of a run: opened for writing, and replayed to restore the core."""

from __future__ import annotations

import time
from typing import Any

from actors.storage.errors import DamagedLog, LeaseFilesMissing
from actors.storage.lease import Lease
from actors.storage.line_epochs import newest_epoch
from actors.storage.line_logs import LineLog, parse_line
from actors.storage.line_writers import LineFile, Lines, open_lines
from actors.storage.storage import DiskStorage
from elastic.protocol.wire import FORMAT, UnreadableJournal, check_format, opening_line
from elastic.replay.journal_lines import NUM_KEPT_RECORDS
from elastic.replay.replay import Replay

MARKER = b'"ControllerState"'
NUM_TAIL_ROWS = 4 * NUM_KEPT_RECORDS


def open_journal(journal: LineLog, lease: Lease) -> Lines:
    """Append to the journal. From now on, lines of older epochs do not count. Raises OSError,
    `LeaseFilesMissing`, `LeaseLost`, and `UnreadableJournal` without a change to the journal.

    On a disk an opening line fences the older epochs. It has the time of the line before it, since
    no process has driven the run in between.
    """
    last_rows = journal.last_rows(1)
    if last_rows and isinstance(last_rows[0].get("format"), int):
        check_format(last_rows[0])
    if not isinstance(journal.storage, DiskStorage):
        return open_lines(journal, lease.epoch, lease.check_now)
    newest = newest_epoch(line for _, line in journal.lines_from_end())
    if newest > lease.epoch:
        raise _removed_lease(journal, newest, lease)
    writer = LineFile(journal.storage.path / journal.name, lease.check_now, epoch=lease.epoch)
    try:
        last = last_rows[0].get("time") if last_rows else None
        writer.write(opening_line(last if isinstance(last, int | float) else time.time()))
    except BaseException:
        writer.close(patience_s=0.0)
        raise
    return writer


def replay(journal: LineLog, end: int | None = None) -> Replay:
    """Replay the journal from its newest full state up to the byte `end` (invariant 10).

    Raises `UnreadableJournal` for a line of another format, and `DamagedLog` for one that cannot
    be replayed.
    """
    replay = Replay()
    for offset, line in journal.lines_with_offsets(_newest_state(journal, end), end):
        take_line(replay, journal, offset, line)
    return replay


def replay_of(lease: Lease, journal: LineLog) -> Replay:
    """Replay the journal for the process that opened it for writing: no older epoch can append to
    it any more. Raises `LeaseFilesMissing`, and as `replay` does."""
    before = replay(journal)
    incarnation = before.core.state.incarnation
    if incarnation >= lease.epoch:
        raise _removed_lease(journal, incarnation, lease)
    return before


def _removed_lease(journal: LineLog, epoch: int, lease: Lease) -> LeaseFilesMissing:
    return LeaseFilesMissing(
        f"{journal.url} has lines of epoch {epoch}, but the lease is of epoch {lease.epoch}: files "
        "of lease/ were removed"
    )


def take_line(replay: Replay, journal: LineLog, offset: int, line: dict[str, Any]) -> None:
    """Replay one line; raises as `replay` does."""
    try:
        replay.take(line)
    except Exception as error:  # a line that no controller wrote may break anything
        is_of_other_format = isinstance(line.get("format"), int) and line["format"] != FORMAT
        if isinstance(error, UnreadableJournal) and is_of_other_format:
            raise
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DamagedLog(journal.url, offset, f"cannot be replayed ({cause})") from error


def newest_rows(metrics: LineLog, replay: Replay) -> list[dict[str, Any]]:
    """The newest lines of the metrics, newest first, at most `NUM_TAIL_ROWS`: back to the oldest
    step whose line may be missing, else to the newest step that the journal knows."""
    state = replay.core.state
    oldest = (state.generation, state.committed_step)
    if replay.records:
        oldest = (replay.records[0].record.generation, replay.records[0].record.step)
    rows: list[dict[str, Any]] = []
    for _, text in metrics.lines_from_end():
        row = parse_line(text)
        if row is None or not is_step_line(row):
            continue  # an unreadable line belongs to no step
        rows.append(row)
        is_oldest = row["step"] == oldest[1] and row["generation"] <= oldest[0]
        if is_oldest or len(rows) >= NUM_TAIL_ROWS:
            break
    return rows


def is_step_line(row: dict[str, Any]) -> bool:
    """Whether a JSON object is a line of metrics."""
    return isinstance(row.get("step"), int) and isinstance(row.get("generation"), int)


def _newest_state(journal: LineLog, end: int | None) -> int:
    """The offset of the newest full state before `end`; 0 if there is none."""
    for offset, line in journal.lines_from_end():
        is_before = end is None or offset + len(line) < end
        if is_before and MARKER in line and parse_line(line) is not None:
            return offset
    return 0
