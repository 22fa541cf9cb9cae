"""The cache `history.json`: a run's history up to some line, from which readers continue.

The run's sidecar process renews it about once a minute. A file that is missing, damaged, of
another version or of other logs is ignored, and the logs are read from their beginning.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from zlib import crc32

from actors.storage.line_logs import LineLog
from elastic.protocol.wire import decode, encode
from pipelines.errors import UserError
from pipelines.observe.history.history import History
from pipelines.observe.history.progress import unit_of
from pipelines.observe.history.run_folder import RunFolder, Tail

NAME = "history.json"
VERSION = 3
LOG_NAMES = ("journal", "metrics", "system")
"""The keys of the file for `RunFolder.history_logs`."""
MARK_BYTES = 256
TAIL_BYTES = 1 << 20
"""How much of a log to read without a cache: enough for the newest loss, speed and memory."""


@dataclass(slots=True)
class FollowedHistory:
    """A run's history, and the position after its last line. For one thread only."""

    folder: RunFolder
    history: History
    journal: Tail
    metrics: Tail
    system: Tail
    _saved: tuple[int, ...] = field(default=(0, 0, 0))

    def follow(self) -> None:
        """Add the new lines. Raises OSError."""
        self.history.take(*(tail.drain() for tail in self.tails))

    @property
    def tails(self) -> tuple[Tail, Tail, Tail]:
        """In the order in which `History.take` wants their lines."""
        return self.journal, self.metrics, self.system

    def save(self) -> None:
        """Renew the file if there are new lines. Raises OSError."""
        offsets = tuple(tail.offset for tail in self.tails)
        if offsets == self._saved:
            return
        body = {
            "version": VERSION,
            **_marks(self.folder, offsets),
            "history": encode(self.history, is_sparse=True),
        }
        self.folder.files.write(NAME, json.dumps(body, separators=(",", ":")).encode())
        self._saved = offsets


def load_history(folder: RunFolder, needs_all_metrics: bool = True) -> FollowedHistory:
    """The cached history, or an empty one, ready to follow. Raises OSError.

    Without a cache, all metrics are read only if `needs_all_metrics`, else the newest ones.
    """
    cached = _cached_history(folder)
    if cached is not None:
        history, offsets = cached
        journal, metrics, system = (
            Tail(log, at) for log, at in zip(folder.history_logs, offsets, strict=True)
        )
        followed = FollowedHistory(folder, history, journal, metrics, system, offsets)
    else:
        begin = 0 if needs_all_metrics else _begin_of_tail(folder.metrics)
        system = Tail(folder.system, _begin_of_tail(folder.system))
        tails = (Tail(folder.journal), Tail(folder.metrics, begin), system)
        followed = FollowedHistory(folder, History(), *tails)
        followed.history.step_time.is_whole = begin == 0
    with suppress(UserError):  # a damaged recipe
        followed.history.progress.unit = unit_of(folder.recipe())
    return followed


def _cached_history(folder: RunFolder) -> tuple[History, tuple[int, ...]] | None:
    try:
        body = json.loads(folder.files.read(NAME))
        if body["version"] != VERSION:
            return None
        offsets = tuple(body[name]["offset"] for name in LOG_NAMES)
        if any(body[name] != mark for name, mark in _marks(folder, offsets).items()):
            return None
        return decode(History, body["history"]), offsets
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # a damaged cache is ignored


def _marks(folder: RunFolder, offsets: tuple[int, ...]) -> dict[str, dict[str, int]]:
    logs = zip(LOG_NAMES, folder.history_logs, offsets, strict=True)
    return {name: _mark(log, offset) for name, log, offset in logs}


def _mark(log: LineLog, offset: int) -> dict[str, int]:
    """An offset in a log and a checksum of the bytes before it, which a repaired log changes."""
    before = b""
    if offset:
        before = log.reader(max(0, offset - MARK_BYTES)).read(min(offset, MARK_BYTES))
    return {"offset": offset, "before": crc32(before)}


def _begin_of_tail(log: LineLog) -> int:
    """The offset of a line about `TAIL_BYTES` before the end of a log."""
    segments = log.segments()
    if not segments or segments[-1].end <= TAIL_BYTES:
        return 0
    end, newest = segments[-1].end, 0
    for offset, _ in log.lines_from_end():
        newest = offset
        if end - offset >= TAIL_BYTES:
            break
    return newest
