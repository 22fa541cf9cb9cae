"""The small kernel that proves a device: quick beside other work, refused by a broken one."""

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
"""Some 2 s of a kernel that occupies one multiprocessor, as a collective that waits does."""
TIMEOUT_S = 120.0


def test_a_device_that_works_passes_beside_a_kernel_that_does_not_end() -> None:
    device = torch.device("cuda")
    check = DeviceCheck(kernel_on(device))
    assert check.failure() is None
    torch.cuda._sleep(BUSY_CYCLES)
    began = time.monotonic()
    assert check.failure() is None
    assert time.monotonic() - began < 1.0
    torch.cuda.synchronize()


def break_device(told: Any) -> None:
    """In a process of its own: an index out of bounds trips a device-side assertion."""
    device = torch.device("cuda")
    check = DeviceCheck(kernel_on(device))
    try:
        torch.zeros(4, device=device)[torch.tensor([10**6], device=device)].cpu()
    except RuntimeError as error:
        told.put(kind_of(error))
    failure = check.failure()
    told.put("" if failure is None else kind_of(failure))


def test_a_device_that_an_assertion_has_stopped_is_broken() -> None:
    context = get_context("spawn")
    told = context.Queue()
    process = context.Process(target=break_device, args=(told,))
    process.start()
    kinds = [told.get(timeout=TIMEOUT_S) for _ in range(2)]
    process.join(TIMEOUT_S)
    assert kinds == ["device", "device"]
