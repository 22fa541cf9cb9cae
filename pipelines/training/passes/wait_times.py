"""What the passes of a process have waited for, for the time split of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from actors.runtime.program import Waits


class WaitTimes:
    """Measures the waits of one training thread; it outlives a generation."""

    def __init__(self) -> None:
        self.total = Waits()
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, data are read or waited for."""
        began_s, began_busy_s = time.perf_counter(), time.thread_time()
        yield
        spent_s = time.perf_counter() - began_s
        asleep_s = max(0.0, spent_s - (time.thread_time() - began_busy_s))
        self._add(data_s=spent_s, data_asleep_s=asleep_s)

    @contextmanager
    def reducing(self, device: torch.device) -> Iterator[None]:
        """Inside, gradients are reduced, after the last backward.

        The host does not wait for a GPU here, so its time is added when the next step reduces: the
        vote has been read since.
        """
        if device.type != "cuda":
            yield
            return
        if self._events is not None:
            first, last = self._events
            if last.query():  # else the step was aborted
                self._add(reduction_s=first.elapsed_time(last) / 1000)
            self._events = None
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events = first, last

    def _add(
        self, data_s: float = 0.0, data_asleep_s: float = 0.0, reduction_s: float = 0.0
    ) -> None:
        total = self.total
        self.total = Waits(
            total.data_s + data_s,
            total.data_asleep_s + data_asleep_s,
            total.reduction_s + reduction_s,
        )
