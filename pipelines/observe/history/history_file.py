"""`history.json`: a run's history up to some line, so that no reader begins at the first line.

The process that follows a run renews it about once a minute. Readers go on from where it ends. It
is only a shortcut: one that is missing, damaged, of another version or of other logs is ignored,
and the logs are read from their beginning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from zlib import crc32

from actors.storage.line_logs import LineLog
from elastic.protocol.wire import decode, encode
from pipelines.observe.history.history import History
from pipelines.observe.history.run_folder import RunFolder, Tail

NAME = "history.json"
VERSION = 1
MARK_BYTES = 256
TAIL_BYTES = 1 << 20
"""Of the metrics, where there is no such file: enough for the newest loss and speed."""


@dataclass(slots=True)
class FollowedHistory:
    """A run's history, and where to read on. Not safe for two threads."""

    folder: RunFolder
    history: History
    journal: Tail
    metrics: Tail
    _saved: tuple[int, int] = field(default=(0, 0))

    def follow(self) -> None:
        """Take in what is new. Raises OSError."""
        self.history.take(self.journal.drain(), self.metrics.drain())

    def save(self) -> None:
        """Renew the file, if there is anything new. Raises OSError."""
        offsets = (self.journal.offset, self.metrics.offset)
        if offsets == self._saved:
            return
        body = {
            "version": VERSION,
            "journal": _mark(self.folder.journal, self.journal.offset),
            "metrics": _mark(self.folder.metrics, self.metrics.offset),
            "history": encode(self.history, is_sparse=True),
        }
        self.folder.files.write(NAME, json.dumps(body, separators=(",", ":")).encode())
        self._saved = offsets


def load_history(folder: RunFolder, needs_all_metrics: bool = True) -> FollowedHistory:
    """The saved history, to be followed on, or an empty one. Raises OSError.

    Without `needs_all_metrics` only the newest metrics are read where none is saved.
    """
    saved = _saved_history(folder)
    if saved is not None:
        history, journal, metrics = saved
        tails = Tail(folder.journal, journal), Tail(folder.metrics, metrics)
        return FollowedHistory(folder, history, *tails, (journal, metrics))
    begin = 0 if needs_all_metrics else _begin_of_tail(folder.metrics)
    return FollowedHistory(folder, History(), Tail(folder.journal), Tail(folder.metrics, begin))


def _saved_history(folder: RunFolder) -> tuple[History, int, int] | None:
    try:
        body = json.loads(folder.files.read(NAME))
        if body["version"] != VERSION:
            return None
        journal, metrics = body["journal"]["offset"], body["metrics"]["offset"]
        for log, name in ((folder.journal, "journal"), (folder.metrics, "metrics")):
            if _mark(log, body[name]["offset"]) != body[name]:
                return None
        return decode(History, body["history"]), journal, metrics
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # it is damaged; nothing of it is needed


def _mark(log: LineLog, offset: int) -> dict[str, int]:
    """A place in a log, and what is right before it: a log that was repaired has other lines."""
    before = b""
    if offset:
        before = log.reader(max(0, offset - MARK_BYTES)).read(min(offset, MARK_BYTES))
    return {"offset": offset, "before": crc32(before)}


def _begin_of_tail(log: LineLog) -> int:
    """The begin of a line about `TAIL_BYTES` before the end of a log."""
    segments = log.segments()
    if not segments or segments[-1].end <= TAIL_BYTES:
        return 0
    end, newest = segments[-1].end, 0
    for offset, _ in log.lines_from_end():
        newest = offset
        if end - offset >= TAIL_BYTES:
            break
    return newest
