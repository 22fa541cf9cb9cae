"""A check that a worker's device still computes, within a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from actors.storage.errors import BrokenDevice

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


class DeviceCheck:
    """Runs a computation on a thread that may block for ever without harm."""

    def __init__(self, compute: Callable[[], None], limit_s: float = LIMIT_S) -> None:
        self._compute = compute
        self._limit_s = limit_s

    def failure(self) -> BrokenDevice | None:
        """The device's error, or None if it computes."""
        raised: list[Exception] = []

        def run() -> None:
            try:
                self._compute()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=run, name="device-check", daemon=True)
        thread.start()
        thread.join(self._limit_s)
        if thread.is_alive():
            return BrokenDevice(f"the device did not finish a small kernel in {self._limit_s:g} s")
        if raised:
            return BrokenDevice(f"the device fails on a small kernel: {raised[0]}")
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
