"""A guard that ends a detached process when neither controller nor driver is heard any more."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable


def end_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class OrphanGuard:
    """Ends this process after `timeout_s` without a call of `hear`, so that it is never orphaned.

    Silence counts only while this process runs: time for which the machine was suspended does not.
    """

    def __init__(self, timeout_s: float, end: Callable[[], None] = end_process) -> None:
        self._timeout_s = timeout_s
        self._end = end
        self._silence_s = 0.0
        threading.Thread(target=self._watch, name="orphan_guard", daemon=True).start()

    def hear(self) -> None:
        self._silence_s = 0.0

    def _watch(self) -> None:
        pause_s = min(1.0, self._timeout_s / 4)
        while self._silence_s < self._timeout_s:
            time.sleep(pause_s)
            self._silence_s += pause_s
        self._end()
