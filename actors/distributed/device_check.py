"""A check that a worker's device still computes, within a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from actors.storage.errors import BrokenDevice

T = TypeVar("T")

LIMIT_S = 10.0
"""A kernel on its own stream takes under a millisecond beside any other work."""
NUM_ELEMENTS = 1024


def kernel_on(device: torch.device) -> Callable[[], None]:
    """A function that runs a small kernel on a CUDA device; on a CPU it does nothing.

    Its stream and memory are allocated here: so a collective that never ends does not block the
    kernel, and it runs when no memory is free.
    """
    if device.type != "cuda":
        return lambda: None
    ones = torch.ones(NUM_ELEMENTS, device=device)
    doubled = torch.empty_like(ones)
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)

    def compute() -> None:
        with torch.cuda.stream(stream):
            torch.add(ones, ones, out=doubled)
            if doubled.tolist() != [2.0] * NUM_ELEMENTS:
                raise ValueError("1 + 1 is not 2 on this device")

    return compute


class TimeLimitExceeded(Exception):
    """A computation has not ended; its thread is left behind."""


def run_within(limit_s: float, compute: Callable[[], T]) -> T:
    """The result of a computation that may block for ever, on a thread of its own.

    Raises what it raises, and `TimeLimitExceeded`.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(compute())
        except BaseException as error:  # a user's code may even exit
            errors.append(error)

    thread = threading.Thread(target=run, name="limited", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeLimitExceeded
    return results[0]


class DeviceCheck:
    """Runs a computation on a thread that may block for ever without harm."""

    def __init__(self, compute: Callable[[], None], limit_s: float = LIMIT_S) -> None:
        self._compute = compute
        self._limit_s = limit_s

    def failure(self) -> BrokenDevice | None:
        """The device's error, or None if it computes."""
        try:
            run_within(self._limit_s, self._compute)
        except TimeLimitExceeded:
            return BrokenDevice(f"the device did not finish a small kernel in {self._limit_s:g} s")
        except Exception as error:
            return BrokenDevice(f"the device fails on a small kernel: {error}")
        return None


def begin_device_check(
    make: Callable[[], Callable[[], None]], limit_s: float = LIMIT_S
) -> DeviceCheck:
    """Create the device check for the computation that `make` returns, and run it once.

    `make` runs within the time limit as well, since it may block on the device. Raises
    `BrokenDevice`.
    """
    made: list[Callable[[], None]] = []

    def make_and_compute() -> None:
        made.append(make())
        made[0]()

    failure = DeviceCheck(make_and_compute, limit_s).failure()
    if failure is not None:
        raise failure
    return DeviceCheck(made[0], limit_s)
