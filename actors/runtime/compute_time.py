"""Compute time: how long a worker itself computes in a step, which identifies stragglers.

In synchronous training all workers' steps last equally long, so the step time shows no straggler.
The time that a thread spends on a processor, or queued for one, excludes its waits for other
workers: it sleeps through these. Queue time counts, since a machine that is busy with other work is
as slow as one with a low clock. On a GPU the host thread only launches kernels, and the device
waits within its work. There, the same matrix product is timed with events now and then.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Protocol

import torch

from actors.runtime.substitute_thread import computed_s, substitute_of

SCHEDSTAT = Path("/proc/thread-self/schedstat")
SCHEDSTAT_OF = "/proc/self/task/{}/schedstat"
"""Nanoseconds on a processor and in the queue for one; not every kernel provides it."""
WIDTH = 4096
"""The width of the matrices that a GPU multiplies: in float16 a fast GPU takes 0.2 ms a product."""
NUM_PRODUCTS = 4


class ComputeTimes(Protocol):
    """Measures one rank in one generation; the vote of each `every`-th step reports the result."""

    def begin(self) -> None:
        """Called when a step begins."""

    def end(self, step: int) -> None:
        """Called when the step has been applied."""

    def ballot(self, step: int, world_rank: int, num_workers: int) -> list[float]:
        """What this rank adds to the vote, so that every rank reads all compute times.

        One entry a rank, in seconds, 0 if nothing was timed; empty if no report is due.
        """


def compute_times(every: int, device: torch.device) -> ComputeTimes:
    """To be called by the training thread; `every` is in steps, 0 for never."""
    return ProductTimes(every, device) if device.type == "cuda" else ThreadTimes(every)


class ThreadTimes:
    """Reports the mean over the steps since the last report. The first step is excluded, since it
    does one-time work."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._clock = ThreadClock() if every else None
        self._begun_s = 0.0
        self._spent_s = 0.0
        self._num_steps = -1

    def begin(self) -> None:
        if self._clock is not None:
            self._begun_s = self._clock.now()

    def end(self, step: int) -> None:
        if self._clock is None:
            return
        if self._num_steps >= 0:
            self._spent_s += self._clock.now() - self._begun_s
        self._num_steps += 1

    def ballot(self, step: int, world_rank: int, num_workers: int) -> list[float]:
        if not _is_due(step, self._every):
            return []
        times_s = [0.0] * num_workers
        if self._num_steps > 0:
            times_s[world_rank] = self._spent_s / self._num_steps
            self._spent_s, self._num_steps = 0.0, 0
        return times_s


class ProductTimes:
    """Times a few products after the step before; they finish while the host launches the next."""

    def __init__(self, every: int, device: torch.device) -> None:
        self._every = every
        self._product = Product(device) if every else None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def begin(self) -> None:
        """Nothing is timed within a step."""

    def end(self, step: int) -> None:
        if self._product is None or not _is_due(step + 1, self._every):
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(NUM_PRODUCTS):
            self._product.compute()
        last.record()
        self._events = first, last

    def ballot(self, step: int, world_rank: int, num_workers: int) -> list[float]:
        if not _is_due(step, self._every):
            return []
        times_s = [0.0] * num_workers
        if self._events is not None:
            first, last = self._events
            last.synchronize()
            times_s[world_rank] = first.elapsed_time(last) / 1000
            self._events = None
        return times_s


class Product:
    """A matrix product: the same work on each GPU."""

    def __init__(self, device: torch.device) -> None:
        self._factor = torch.ones(WIDTH, WIDTH, dtype=torch.float16, device=device)
        self._product = torch.empty_like(self._factor)

    def compute(self) -> None:
        torch.mm(self._factor, self._factor, out=self._product)


class ThreadClock:
    """Compute time of the thread that creates it, and of that thread's substitute."""

    def __init__(self, schedstat: Path = SCHEDSTAT) -> None:
        self._file = None
        self._files: dict[int, FileIO] = {}
        with suppress(OSError):
            self._file = schedstat.open("rb", buffering=0)

    def now(self) -> float:
        """Seconds on a processor and queued for one; without schedstat, on a processor alone."""
        if self._file is None:
            return computed_s()
        return _spent_s(self._file) + self._substitute_spent_s()

    def _substitute_spent_s(self) -> float:
        thread = substitute_of(threading.get_ident())
        if thread is None or thread.native_id is None or not thread.is_alive():
            return 0.0
        if thread.native_id not in self._files:
            path = Path(SCHEDSTAT_OF.format(thread.native_id))
            self._files = {thread.native_id: path.open("rb", buffering=0)}
        return _spent_s(self._files[thread.native_id])


def _spent_s(schedstat: FileIO) -> float:
    on_processor, queued, _ = os.pread(schedstat.fileno(), 128, 0).split()
    return (int(on_processor) + int(queued)) / 1e9


def _is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
