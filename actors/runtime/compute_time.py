"""How long a worker itself computes for its steps: that tells a slow one from those that wait.

In synchronous training all steps last equally long. What a thread has spent on a processor, or
queued for one, has none of its waits for others in it: these it sleeps through. Both are counted,
since a machine that has other things to do is as slow as one whose clock is low. On a GPU the
host's thread only gives orders, and the device waits in the midst of its work: there the same
product of two matrices is timed by events now and then.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Protocol

import torch

from actors.runtime.substitute_thread import computed_s, stand_in_of

SCHEDSTAT = Path("/proc/thread-self/schedstat")
SCHEDSTAT_OF = "/proc/self/task/{}/schedstat"
"""Nanoseconds on a processor and in the queue for one; not every kernel has it."""
WIDTH = 4096
"""Of the matrices that a GPU multiplies: in float16 a product takes 0.2 ms of a fast one."""
NUM_PRODUCTS = 4


class ComputeTimes(Protocol):
    """One rank's, in one generation; told by the vote of each `every`-th step."""

    def begin(self) -> None:
        """A step begins."""

    def end(self, step: int) -> None:
        """It has been applied."""

    def ballot(self, step: int, world_rank: int, num_workers: int) -> list[float]:
        """What this rank adds to the vote, so that all read everybody's: a place for each rank, in
        seconds, 0 if nothing was timed; or no place at all."""


def compute_times(every: int, device: torch.device) -> ComputeTimes:
    """To be called by the thread that trains; `every` is in steps, 0 for never."""
    return ProductTimes(every, device) if device.type == "cuda" else ThreadTimes(every)


class ThreadTimes:
    """The mean of the steps since it was last told; the first is left out, since in it much is
    done for the first time."""

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
        places = [0.0] * num_workers
        if self._num_steps > 0:
            places[world_rank] = self._spent_s / self._num_steps
            self._spent_s, self._num_steps = 0.0, 0
        return places


class ProductTimes:
    """A few products after the step before; they are done when the next one's orders are given."""

    def __init__(self, every: int, device: torch.device) -> None:
        self._every = every
        self._product = Product(device) if every else None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def begin(self) -> None:
        """Nothing is timed amid a step."""

    def end(self, step: int) -> None:
        if self._product is None or not _is_due(step + 1, self._every):
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(NUM_PRODUCTS):
            self._product.compute()
        last.record()
        self._events = first, last

    def ballot(self, step: int, world_rank: int, num_workers: int) -> list[float]:
        if not _is_due(step, self._every):
            return []
        places = [0.0] * num_workers
        if self._events is not None:
            first, last = self._events
            last.synchronize()
            places[world_rank] = first.elapsed_time(last) / 1000
            self._events = None
        return places


class Product:
    """The same work on each GPU."""

    def __init__(self, device: torch.device) -> None:
        self._factor = torch.ones(WIDTH, WIDTH, dtype=torch.float16, device=device)
        self._product = torch.empty_like(self._factor)

    def compute(self) -> None:
        torch.mm(self._factor, self._factor, out=self._product)


class ThreadClock:
    """Of the thread that makes it, and of who stands in for it."""

    def __init__(self, schedstat: Path = SCHEDSTAT) -> None:
        self._file = None
        self._files: dict[int, FileIO] = {}
        with suppress(OSError):
            self._file = schedstat.open("rb", buffering=0)

    def now(self) -> float:
        """Seconds that it has computed, or would have."""
        if self._file is None:
            return computed_s()
        return _spent_s(self._file) + self._of_stand_in()

    def _of_stand_in(self) -> float:
        thread = stand_in_of(threading.get_ident())
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
