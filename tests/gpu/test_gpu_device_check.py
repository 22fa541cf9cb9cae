"""The device check by a small kernel: fast beside other work, failing on a broken device."""

from __future__ import annotations

import time
from multiprocessing import get_context
from typing import Any

import torch
from one_gpu import NEEDS_GPU

from actors.distributed.device_check import DeviceCheck, kernel_on
from actors.worker.error_kinds import kind_of

pytestmark = NEEDS_GPU

BUSY_CYCLES = 4_000_000_000
"""About 2 s of a kernel that occupies one multiprocessor, as a waiting collective does."""
TIMEOUT_S = 120.0


def test_working_device_passes_beside_a_long_kernel() -> None:
    device = torch.device("cuda")
    check = DeviceCheck(kernel_on(device))
    assert check.failure() is None
    torch.cuda._sleep(BUSY_CYCLES)
    began = time.monotonic()
    assert check.failure() is None
    assert time.monotonic() - began < 1.0
    torch.cuda.synchronize()


def break_device(kinds_queue: Any) -> None:
    """Run in a separate process: an index out of bounds triggers a device-side assertion."""
    device = torch.device("cuda")
    check = DeviceCheck(kernel_on(device))
    try:
        torch.zeros(4, device=device)[torch.tensor([10**6], device=device)].cpu()
    except RuntimeError as error:
        kinds_queue.put(kind_of(error))
    failure = check.failure()
    kinds_queue.put("" if failure is None else kind_of(failure))


def test_device_after_a_device_side_assertion_is_broken() -> None:
    context = get_context("spawn")
    kinds_queue = context.Queue()
    process = context.Process(target=break_device, args=(kinds_queue,))
    process.start()
    kinds = [kinds_queue.get(timeout=TIMEOUT_S) for _ in range(2)]
    process.join(TIMEOUT_S)
    assert kinds == ["device", "device"]
