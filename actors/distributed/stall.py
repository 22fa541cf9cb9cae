"""Detection of a training thread that no abort wakes before the group's timeout.

When a connection breaks, Gloo (`Pair::signalException` in transport/tcp/pair.cc) fails neither the
queued outgoing messages nor a half-received one, so a thread that waits for them stays blocked.
NCCL leaves a thread that connects two ranks in the launch of their first exchange. Such a thread is
abandoned, and another replaces it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType

import torch
from torch.distributed import Work

from actors.distributed.backends.waiting import launching, waiting
from actors.runtime.substitute_thread import working_thread

STALL_S = 0.1
"""A thread that an abort wakes raises within 0.01 s."""

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

    @property
    def is_in_launch(self) -> bool:
        """Whether the thread launches an exchange; see `launching`."""
        return _is_in_launch(self._frame())

    def lasts(self) -> bool:
        """Whether the thread has waited in torch for `STALL_S`: in one wait for other ranks, or
        elsewhere without processor time. NCCL uses some while it waits.

        User code that hangs does not count: another thread would hang there again.
        """
        frame = self._frame()
        position: tuple[FrameType, float | None] | None = None
        if frame is not None and (_is_in_launch(frame) or _waits_for_ranks(frame)):
            position = (frame, None)
        elif frame is not None and _is_in_torch(frame):
            assert self._thread.ident is not None
            clock = time.pthread_getcpuclockid(working_thread(self._thread.ident))
            position = (frame, time.clock_gettime(clock))
        if position is None or position != self._position:
            self._position, self._since = position, time.monotonic()
        return time.monotonic() - self._since > STALL_S

    def _frame(self) -> FrameType | None:
        """What the thread executes; None before it begins and after it ends."""
        ident = self._thread.ident
        if ident is None or not self._thread.is_alive():
            return None
        return sys._current_frames().get(working_thread(ident))


def _is_in_launch(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is launching.__code__:
            return True
        frame = frame.f_back
    return False


def _is_in_torch(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_TORCH) and not file.startswith(_LOADERS)


def _waits_for_ranks(frame: FrameType) -> bool:
    return frame.f_code is waiting.__code__
