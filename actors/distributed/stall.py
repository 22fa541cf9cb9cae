"""Detection of a training thread that Gloo will not wake before the group's timeout.

When a connection breaks, Gloo (`Pair::signalException` in transport/tcp/pair.cc) fails neither the
queued outgoing messages nor a half-received one, so a thread that waits for them stays blocked.
Such a thread is abandoned, and another replaces it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType

import torch
from torch.distributed import Work

from actors.distributed.backends.waiting import waiting
from actors.runtime.substitute_thread import working_thread

STALL_S = 0.1
"""A thread that Gloo wakes raises within 0.01 s after its connections have been shut."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_LOADERS = os.path.join(_TORCH, "utils", "data")


def wait_for(work: Work) -> None:
    """Wait for a transfer; see `waiting`."""
    waiting(work.wait)


class StallDetector:
    """Watches one thread; `lasts` is to be polled."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._position: tuple[FrameType, float | None] | None = None
        self._since = 0.0

    def lasts(self) -> bool:
        """Whether the thread has waited in torch for `STALL_S`: in one wait for other ranks, or
        elsewhere without processor time. NCCL uses some while it waits.

        User code that hangs does not count: another thread would hang there again.
        """
        ident = self._thread.ident
        if ident is None or not self._thread.is_alive():
            return False
        ident = working_thread(ident)
        frame = sys._current_frames().get(ident)
        spent_s = time.clock_gettime(time.pthread_getcpuclockid(ident))
        position = None
        if frame is not None and _waits_in_torch(frame):
            position = (frame, None if _waits_for_ranks(frame) else spent_s)
        if position is None or position != self._position:
            self._position, self._since = position, time.monotonic()
        return time.monotonic() - self._since > STALL_S


def _waits_in_torch(frame: FrameType) -> bool:
    if _waits_for_ranks(frame):
        return True
    file = frame.f_code.co_filename
    return file.startswith(_TORCH) and not file.startswith(_LOADERS)


def _waits_for_ranks(frame: FrameType) -> bool:
    return frame.f_code is waiting.__code__
