"""A thread that follows a run's files, so that slow storage delays no display."""

from __future__ import annotations

import threading
from typing import Any

from pipelines.observe.history.history import History
from pipelines.observe.history.history_file import load_history
from pipelines.observe.history.run_folder import RunFolder, Tail

LOOK_EVERY_S = 0.5
Rows = list[dict[str, Any]]


class Follower:
    """Reads journal, metrics and system samples in its own thread, until `finish`.

    `trouble` is the reason why they cannot be read at present, or empty. `history` is the run's
    saved history; `take` returns the lines after it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.trouble = ""
        self.history = History()
        self._tails = tuple(map(Tail, folder.history_logs))
        try:
            followed = load_history(folder)
            self.history, self._tails = followed.history, followed.tails
        except OSError as error:
            self.trouble = str(error)
        self._rows: tuple[Rows, Rows, Rows] = [], [], []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="follower", daemon=True)
        self._thread.start()

    def take(self) -> tuple[Rows, Rows, Rows]:
        """The new lines of each file since the last call, for `History.take`."""
        with self._lock:
            rows, self._rows = self._rows, ([], [], [])
        return rows

    def finish(self, patience_s: float) -> None:
        """Read the remaining lines and end the thread; wait at most `patience_s`."""
        self._ending.set()
        self._thread.join(patience_s)

    def _serve(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ending.wait(LOOK_EVERY_S)
            try:
                for index, tail in enumerate(self._tails):
                    for block in tail.blocks():
                        with self._lock:
                            self._rows[index].extend(block)
                self.trouble = ""
            except OSError as error:
                self.trouble = str(error)
