"""Following a run's lines while it goes on, aside whoever shows them: storage may take its time."""

from __future__ import annotations

import threading
from typing import Any

from pipelines.observe.history.history import History
from pipelines.observe.history.history_file import load_history
from pipelines.observe.history.run_folder import RunFolder, Tail

LOOK_EVERY_S = 0.5
Rows = list[dict[str, Any]]


class Follower:
    """Reads the journal and the metrics in a thread of its own, until `finish`.

    `trouble` is why they cannot be read at present, or empty; `history` is what had been saved of
    the run before, and the lines that are given out come after it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.trouble = ""
        self.history = History()
        self._tails = Tail(folder.journal), Tail(folder.metrics)
        try:
            followed = load_history(folder)
            self.history, self._tails = followed.history, (followed.journal, followed.metrics)
        except OSError as error:
            self.trouble = str(error)
        self._rows: tuple[Rows, Rows] = [], []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="follower", daemon=True)
        self._thread.start()

    def take(self) -> tuple[Rows, Rows]:
        """What has come since, of the journal and of the metrics."""
        with self._lock:
            rows, self._rows = self._rows, ([], [])
        return rows

    def finish(self, patience_s: float) -> None:
        """Read what is there now, if that takes no longer, and end."""
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
