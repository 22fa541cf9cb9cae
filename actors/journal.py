"""The run's append-only files: a line is whole or absent, and durable when that matters."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic.core import Core
from elastic.state import CoreState
from elastic.wire import replayed


class LineFile:
    """One JSON object a line, flushed line by line, so that a reader may follow it live."""

    def __init__(self, path: Path) -> None:
        _cut_half_line(path)
        self._file = open(path, "a")  # noqa: SIM115 (it stays open for the run)

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def make_durable(self) -> None:
        """What has been written outlives the machine."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; none if it is not there."""
    if not path.exists():
        return
    with open(path) as file:
        for text in file:
            if text.endswith("\n"):
                yield json.loads(text)


def replay(path: Path) -> Core:
    """The core as the journal leaves it (invariant 10).

    Begins at the newest full state and takes the events after it; `time` is clamped so that it
    never goes back. Raises `UnreadableJournal` for a line of another format.
    """
    core, now = Core(), 0.0
    for line in read_lines(path):
        told = replayed(line)
        now = max(now, line["time"])
        if isinstance(told, CoreState):
            core = Core(told)
        elif told is not None:
            core.step(now, told)
    return core


def _cut_half_line(path: Path) -> None:
    """A writer that died in the middle of a line has written nothing."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
