"""A process that ends itself when nobody is there for it any more."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable


def end_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class OrphanGuard:
    """Ends this process when nobody has been heard for too long: detached, never orphaned.

    Silence is counted only while this process runs: a machine that stood still has missed nothing.
    """

    def __init__(self, timeout_s: float, end: Callable[[], None] = end_process) -> None:
        self._timeout_s = timeout_s
        self._end = end
        self._silence_s = 0.0
        threading.Thread(target=self._serve, name="orphan_guard", daemon=True).start()

    def hear(self) -> None:
        self._silence_s = 0.0

    def _serve(self) -> None:
        pause_s = min(1.0, self._timeout_s / 4)
        while self._silence_s < self._timeout_s:
            time.sleep(pause_s)
            self._silence_s += pause_s
        self._end()
