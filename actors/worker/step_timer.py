"""The time split of a step: where the training thread was between two step records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from actors.runtime.compute_time import ThreadClock
from actors.runtime.program import Waits
from elastic.protocol.votes import SPLIT


class StepTimer:
    """Splits the time of one rank in one generation; to be used by the training thread alone.

    On a CPU, communication that is not hidden is the time in which the training thread computes
    neither nor waits for a processor nor for data: it sleeps until other workers' bytes arrive. On
    a GPU, the thread only launches kernels. There it is what the device waits for reductions after
    the last backward, as the program has measured it; gathers in the middle count as compute.
    """

    def __init__(self, device: torch.device, waits: Callable[[], Waits]) -> None:
        self._clock = ThreadClock() if device.type == "cpu" else None
        self._waits = waits
        self._mark_s: float | None = None
        """The end of the latest part; None before the generation's first step."""
        self._spent_s = dict.fromkeys(SPLIT, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside is this part; what came before it since the last one is `other_s`."""
        self._lap("other_s")
        yield
        self._lap(name)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What happens inside is compute, except for its waits."""
        self._lap("other_s")
        waits, busy_s = self._waits(), self._busy_s()
        yield
        spent_s = self._lap("compute_s")
        after = self._waits()
        data_s = after.data_s - waits.data_s
        if self._clock is None:
            reduction_s = after.reduction_s - waits.reduction_s
        else:
            asleep_s = spent_s - (self._busy_s() - busy_s)
            reduction_s = asleep_s - (after.data_asleep_s - waits.data_asleep_s)
        self._move("data_s", data_s)
        self._move("communication_s", reduction_s)

    def split(self) -> dict[str, Any]:
        """For the step record: the seconds of each part since the last call, to the microsecond."""
        self._lap("other_s")
        spent_s, self._spent_s = self._spent_s, dict.fromkeys(SPLIT, 0.0)
        return {name: round(value, 6) for name, value in spent_s.items()}

    def _busy_s(self) -> float:
        return self._clock.now() if self._clock is not None else 0.0

    def _lap(self, name: str) -> float:
        """Count the time since the latest part as this part; return it."""
        now = time.perf_counter()
        spent_s = 0.0 if self._mark_s is None else now - self._mark_s
        self._spent_s[name] += spent_s
        self._mark_s = now
        return spent_s

    def _move(self, name: str, seconds: float) -> None:
        """Count some of the compute time as another part."""
        seconds = min(max(0.0, seconds), self._spent_s["compute_s"])
        self._spent_s["compute_s"] -= seconds
        self._spent_s[name] += seconds
