"""The record of which samples each data rank read, for those who want to check."""

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
    """Append one line with a step's sample ids. Raises nothing if the file takes no line at
    present: the line waits in memory, in this process."""
    row = {"step": step, "generation": generation, "world_rank": world_rank, "ids": list(ids)}
    _log_of(file).append(f"{json.dumps(row)}\n".encode())


class SampleLog:
    """Lines of this process in a file to which others append as well: each line is a single write,
    so that those of others never mix."""

    def __init__(self, file: Path, retry_every_s: float = RETRY_EVERY_S) -> None:
        self._file = file
        self._retry_every_s = retry_every_s
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        self._retrying: threading.Thread | None = None

    @property
    def num_waiting(self) -> int:
        """How many lines the file has not taken yet."""
        return len(self._waiting)

    def append(self, line: bytes) -> None:
        """Write a line, after those that wait; what is refused is tried again by a thread."""
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
        """Whether all that waited is written."""
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
                    print(
                        f"elastic: {self._file}: {error}; tried again", file=sys.stderr, flush=True
                    )
        return not self._waiting

    def _write_first(self, descriptor: int) -> None:
        """A full disk may take a part of a line: the whole line comes again, on a line of its
        own."""
        line = self._waiting[0]
        num_written = os.write(descriptor, line)
        if num_written == len(line):
            del self._waiting[0]
        elif num_written and not line.startswith(b"\n"):
            self._waiting[0] = b"\n" + line


@cache
def _log_of(file: Path) -> SampleLog:
    """One a file and process: its lines wait across generations."""
    return SampleLog(file)
