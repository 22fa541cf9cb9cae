"""The log of the samples that each data rank reads, for checks of the data order."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

RETRY_EVERY_S = 0.5


def append_samples(
    file: Path, step: int, generation: int, world_rank: int, ids: Sequence[int]
) -> None:
    """Append one line with a step's sample ids. If the write fails, nothing is raised: the line
    stays in this process's memory and is retried."""
    row = {"step": step, "generation": generation, "world_rank": world_rank, "ids": list(ids)}
    _log_of(file).append(f"{json.dumps(row)}\n".encode())


class SampleLog:
    """Appends lines to a file to which other processes append, too. Each line is a single write, so
    that lines never interleave."""

    def __init__(self, file: Path, retry_every_s: float = RETRY_EVERY_S) -> None:
        self._file = file
        self._retry_every_s = retry_every_s
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        self._retrying: threading.Thread | None = None

    @property
    def num_waiting(self) -> int:
        """The number of lines that are not written yet."""
        return len(self._waiting)

    def append(self, line: bytes) -> None:
        """Write a line after the pending ones; a thread retries failed writes."""
        with self._lock:
            self._waiting.append(line)
            if self._retrying is None and not self._write():
                self._retrying = threading.Thread(target=self._retry, name="samples", daemon=True)
                self._retrying.start()

    def _retry(self) -> None:
        while True:
            time.sleep(self._retry_every_s)
            with self._lock:
                if self._write():
                    self._retrying = None
                    return

    def _write(self) -> bool:
        """Write the pending lines; return whether all are written."""
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                while self._waiting:
                    self._write_first(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:  # an outage of the file's storage must not end the run
            if self._retrying is None:
                with suppress(OSError):  # the output may lie on the same full disk
                    print(f"elastic: {self._file}: {error}; retrying", file=sys.stderr, flush=True)
        return not self._waiting

    def _write_first(self, descriptor: int) -> None:
        """Write the first pending line. If a full disk takes only a part of it, the full line is
        written again after a line break."""
        line = self._waiting[0]
        num_written = os.write(descriptor, line)
        if num_written == len(line):
            del self._waiting[0]
        elif num_written and not line.startswith(b"\n"):
            self._waiting[0] = b"\n" + line


@cache
def _log_of(file: Path) -> SampleLog:
    """The log of a file, one per process: its pending lines outlive a generation."""
    return SampleLog(file)
