"""Copy of a worker's newest output in the run folder, which outlives the node."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from actors.storage.storage import Storage

FOLDER = "logs"
KEPT_BYTES = 1 << 16
STREAMS = {"out": 1, "err": 2}
"""File descriptor of each stream; its name is the suffix of the file in the run folder."""
KEEP_EVERY_S = 10.0


def kept_name(worker: str, stream: str) -> str:
    return f"{FOLDER}/{worker}.{stream}"


class KeptOutput:
    """Copies the newest `KEPT_BYTES` of this process's standard output and error to a run folder.

    It works only if both go to files, as in Ray's workers; then it also sees what C code writes.
    If storage does not answer, it tries again; nothing waits for it.
    """

    def __init__(self, run: Storage, worker: str) -> None:
        self._run = run
        self._worker = worker
        self._kept: dict[str, int] = {}
        """The size of each stream's file at its latest copy."""
        self._due = threading.Event()
        threading.Thread(target=self._serve, name="output", daemon=True).start()

    def hurry(self) -> None:
        """Copy the output now: the process may end soon."""
        self._due.set()

    def keep(self) -> None:
        """Copy the streams that have grown since the last copy. Raises `OSError`."""
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
                continue  # try again at the next interval


def _end_of(file: Path) -> bytes:
    with open(file, "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - KEPT_BYTES))
        return log.read()
