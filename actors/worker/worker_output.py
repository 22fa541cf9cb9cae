"""Copy of a worker's newest output in the run folder, which outlives the node.

The worker copies its output at intervals. When its process has ended, its node still has the rest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from actors.storage.storage import LASTING_ERRORS, Storage, open_storage, retry

FOLDER = "logs"
KEPT_BYTES = 1 << 16
STREAMS = {"out": 1, "err": 2}
"""File descriptor of each stream; its name is the suffix of the file in the run folder."""
KEEP_EVERY_S = 10.0
COPY_PATIENCE_S = 5.0


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
        for stream, file in output_files().items():
            size = file.stat().st_size
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


def output_files() -> dict[str, Path]:
    """The files of this process's standard output and error; none for a pipe or a device."""
    targets = {name: Path(os.readlink(f"/proc/self/fd/{fd}")) for name, fd in STREAMS.items()}
    return {name: file for name, file in targets.items() if file.is_file()}


def copy_output(run_folder: str, worker: str, files: Mapping[str, Path]) -> None:
    """Copy to a run folder what a worker, whose process has ended, wrote since its own last copy.

    `files` are its `output_files` on this machine. Raises `OSError`.
    """
    run = open_storage(run_folder)

    def copy() -> None:
        for stream, file in files.items():
            name, size = kept_name(worker, stream), file.stat().st_size
            if size > KEPT_BYTES or size != (run.size(name) or 0):
                run.write(name, _end_of(file))

    retry(copy, COPY_PATIENCE_S, lasting=LASTING_ERRORS)


def _end_of(file: Path) -> bytes:
    with open(file, "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - KEPT_BYTES))
        return log.read()
