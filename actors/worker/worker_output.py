"""What a worker prints: its newest end is kept in the run's folder, and outlives the node."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from actors.storage.storage import Storage

FOLDER = "logs"
KEPT_BYTES = 1 << 16
STREAMS = {"out": 1, "err": 2}
"""The ends of the kept files' names, and the descriptors that they are of."""
KEEP_EVERY_S = 10.0


def kept_name(worker: str, stream: str) -> str:
    return f"{FOLDER}/{worker}.{stream}"


class KeptOutput:
    """Keeps the newest `KEPT_BYTES` of this process's standard output and error in a run's folder.

    Only where both go to files, as Ray has it: whatever writes there, also in C, is seen. A
    storage that does not answer is tried again; nothing waits for it.
    """

    def __init__(self, run: Storage, worker: str) -> None:
        self._run = run
        self._worker = worker
        self._kept: dict[str, int] = {}
        """The sizes up to which they are kept."""
        self._due = threading.Event()
        threading.Thread(target=self._serve, name="output", daemon=True).start()

    def hurry(self) -> None:
        """Keep what there is now: the process may soon end."""
        self._due.set()

    def keep(self) -> None:
        """Keep what has come since. Raises `OSError`."""
        for stream, number in STREAMS.items():
            file = Path(os.readlink(f"/proc/self/fd/{number}"))
            size = file.stat().st_size if file.is_file() else 0
            if size > self._kept.get(stream, 0):
                self._run.write(kept_name(self._worker, stream), _end_of(file))
                self._kept[stream] = size

    def _serve(self) -> None:
        while True:
            self._due.wait(KEEP_EVERY_S)
            self._due.clear()
            try:
                self.keep()
            except OSError:
                continue  # the next time again


def _end_of(file: Path) -> bytes:
    with open(file, "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - KEPT_BYTES))
        return log.read()
