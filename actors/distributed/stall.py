"""Notice a training thread that Gloo will not wake before the group's timeout.

When a connection breaks, Gloo (`Pair::signalException` in transport/tcp/pair.cc) tells neither the
messages that are queued to be written nor the one that has come in half, so whoever waits for
them goes on waiting. Such a thread is left behind, and another takes its place.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType

import torch
from torch.distributed import Work

from actors.runtime.substitute_thread import working_thread

STANDSTILL_S = 0.1
"""A thread that is woken raises within 0.01 s after its connections have been shut."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_LOADERS = os.path.join(_TORCH, "utils", "data")


def wait_for(work: Work) -> None:
    """Wait for a transfer from code that is not torch's, where a watcher knows it for a wait."""
    work.wait()


class StallDetector:
    """Watches one thread; `lasts` is to be asked again and again."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._spent_s = -1.0
        self._since = 0.0

    def lasts(self) -> bool:
        """Whether it has waited in torch, and used no processor, for a while.

        Code of the user's that hangs is not meant: another thread would hang there again.
        """
        ident = self._thread.ident
        if ident is None or not self._thread.is_alive():
            return False
        ident = working_thread(ident)
        frame = sys._current_frames().get(ident)
        spent_s = time.clock_gettime(time.pthread_getcpuclockid(ident))
        if frame is None or spent_s != self._spent_s or not _waits_in_torch(frame):
            self._spent_s, self._since = spent_s, time.monotonic()
        return time.monotonic() - self._since > STANDSTILL_S


def _waits_in_torch(frame: FrameType) -> bool:
    if frame.f_code is wait_for.__code__:
        return True
    file = frame.f_code.co_filename
    return file.startswith(_TORCH) and not file.startswith(_LOADERS)
