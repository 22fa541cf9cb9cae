"""Journal repair: what can be replayed stays, the rest is set aside, nothing is deleted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from actors.controller.journal import open_journal, replay
from actors.storage.errors import DamagedLog
from actors.storage.lease import Lease
from actors.storage.line_logs import BLOCK_BYTES, LineLog
from actors.storage.line_writers import SegmentWriter, cutting
from actors.storage.storage import DiskStorage, make_durable
from elastic.protocol.wire import FORMAT, state_line
from elastic.replay.replay import Replay

DAMAGED_FOLDER = "damaged"
"""The folder inside the run folder for what is set aside."""


@dataclass(frozen=True)
class Damage:
    """Damage at the byte `offset`: `whole` is the replay up to there, later lines are lost."""

    offset: int
    cause: str
    whole: Replay
    num_lost_lines: int

    @property
    def lost(self) -> str:
        return f"{self.num_lost_lines:,} lines of the journal from byte {self.offset} on"


def examine_journal(journal: LineLog) -> Damage | None:
    """Find a journal's damage; None if it has none.

    Raises `UnreadableJournal` if it is of another format, and `OSError`.
    """
    end, cause = None, ""
    while True:
        try:
            whole = replay(journal, end)
        except DamagedLog as error:
            end, cause = error.offset, cause or str(error)
        else:
            break
    if end is None:
        return None
    num_lost = sum(block.count(b"\n") for block in journal.blocks(end))
    return Damage(end, cause, whole, num_lost)


def repair_journal(journal: LineLog, damage: Damage, lease: Lease) -> str:
    """End the journal before its damage, with a full state line; return where the rest is.

    The generations of the lost lines are not used again.
    """
    state = damage.whole.core.state
    state.generation = max([state.generation, *_generations(journal, damage.offset)])
    state.incarnation = lease.epoch
    now = max(damage.whole.now, time.time())
    warning = f"{damage.cause}; {damage.lost} are set aside"
    lines = [
        state_line(now, state),
        {"time": now, "warning": warning, "format": FORMAT},
    ]
    lease.check_now()
    if isinstance(journal.storage, DiskStorage):
        return _repair_file(journal.storage, journal.name, damage.offset, lines, lease)
    segments = SegmentWriter(journal, lease.epoch, lease.check_now, begin=damage.offset)
    for line in lines:
        segments.append(line)
    segments.ship()
    return f"{journal.url}, in segments of epochs before {lease.epoch}, which do not count any more"


def _repair_file(
    run: DiskStorage, name: str, offset: int, lines: list[dict[str, Any]], lease: Lease
) -> str:
    aside = f"{DAMAGED_FOLDER}/{name}.from-byte-{offset}.epoch-{lease.epoch}"
    with open(run.path / name, "rb+", buffering=0) as file, cutting(file):
        lease.check_now()
        file.seek(offset)
        with run.writing(aside) as copy:
            while block := file.read(BLOCK_BYTES):
                copy.write(block)
        make_durable(run.path / DAMAGED_FOLDER)
        file.truncate(offset)
        os.fsync(file.fileno())
    writer = open_journal(LineLog(run, name), lease)
    for line in lines:
        writer.write(line)
    writer.make_durable()
    unwritten = writer.close()
    if unwritten:
        raise OSError(unwritten)
    return run.at(aside).url


def _generations(journal: LineLog, offset: int) -> Iterator[int]:
    """The generations in the lost lines. Opening a run looks up those in its other files."""
    for row in journal.rows(offset):
        if isinstance(row.get("generation"), int):
            yield row["generation"]
