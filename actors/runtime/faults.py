"""Fault injection: a worker kills, stops, slows or corrupts itself at a given moment."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from actors.runtime.compute_time import NUM_PRODUCTS, Product
from actors.runtime.fault_spec import Fault, Moment
from actors.runtime.substitute_thread import computed_s
from elastic.protocol.votes import BrokenVote

WASTED_WIDTH = 64
"""The width of the matrices that a slowed worker multiplies."""


class FaultInjector:
    """Injects one worker's faults among those of a run."""

    def __init__(self, worker: str, faults: tuple[Fault, ...] = ()) -> None:
        self._due = [fault for fault in faults if fault.worker == worker]
        self._computed_s = 0.0

    def at(self, moment: Moment, step: int) -> None:
        """Inject the faults that are due now. `hang` blocks without checking for interruption."""
        for fault in self._take(("kill", "stop", "hang", "raise"), moment, step):
            match fault.action:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "hang":
                    time.sleep(3600)
                case "raise":
                    # No user code runs in `reading`: the collective fails there.
                    kind = BrokenVote if moment == "reading" else RuntimeError
                    raise kind(f"injected fault: {fault.worker} raises at step {step}")

    def flip_a_bit(self, step: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Silently corrupt the state, as a cosmic ray or a broken device does.

        It flips a high mantissa bit of the first element of the first parameter.
        """
        for _ in self._take(("flip",), "compute", step):
            tensor = next(tensor for tensor in tensors().values() if tensor.numel())
            element = tensor[(0,) * tensor.ndim].reshape(1)
            element.view(torch.uint8)[-2].bitwise_xor_(0b1000)

    def poison(self, step: int, sums: Tensor) -> None:
        """Set this worker's loss sum and its squared gradient norm to NaN."""
        for _ in self._take(("nan",), "compute", step):
            sums[0] = sums[2] = math.nan

    def slow_down(self, step: int, device: torch.device, interrupt: Callable[[], None]) -> None:
        """Waste compute: on a CPU `factor` times the time since the last call, on a GPU as if other
        processes used it as well."""
        slow = [fault for fault in self._due if fault.action == "slow" and fault.step <= step]
        if slow and device.type == "cuda":
            self._due = [fault for fault in self._due if fault not in slow]
            for _ in range(max(1, round(slow[-1].factor) - 1)):
                threading.Thread(target=_occupy, args=(device,), daemon=True).start()
        elif slow:
            self._waste_time(slow[-1].factor, interrupt)

    @property
    def link_factor(self) -> float:
        """How many times slower this worker measures its links."""
        return max((f.factor for f in self._due if f.action == "slow_link"), default=1.0)

    @property
    def has_device_error(self) -> bool:
        return any(fault.action == "ecc" for fault in self._due)

    def device_error(self, step: int) -> str:
        """An error that the device reports at a step, 0 being before it joins; empty for none."""
        errors = [fault for fault in self._due if fault.action == "ecc" and fault.step <= step]
        self._due = [fault for fault in self._due if fault not in errors]
        return "injected fault: uncorrectable ECC error" if errors else ""

    def _waste_time(self, factor: float, interrupt: Callable[[], None]) -> None:
        begun_s, self._computed_s = self._computed_s, computed_s()
        if not begun_s:
            return
        surplus_s = (factor - 1.0) * (self._computed_s - begun_s)
        numbers = torch.ones(WASTED_WIDTH, WASTED_WIDTH)
        while computed_s() < self._computed_s + surplus_s:
            numbers.mm(numbers)
            interrupt()
        self._computed_s = computed_s()

    def _take(self, actions: tuple[str, ...], moment: Moment, step: int) -> list[Fault]:
        """The faults with these actions that are due now; each is injected once."""
        due = [
            fault
            for fault in self._due
            if fault.action in actions and fault.moment == moment and fault.step in (0, step)
        ]
        for fault in due:
            self._due.remove(fault)
        return due


def _occupy(device: torch.device) -> None:
    """Keep a GPU busy, for ever."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        product = Product(device)
        while True:
            for _ in range(NUM_PRODUCTS):
                product.compute()
            stream.synchronize()
