"""Compute and memory of a device: whether it calculates and stores correctly, and its speed."""

from __future__ import annotations

import os
import platform
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor

from actors.storage.errors import UnhealthyMachine

WIDTH_ON_CPU, WIDTH_ON_GPU = 384, 4096
"""Widths of the matrices: 2 ms a product on one core, 0.2 ms on a fast GPU."""
NUM_PRODUCTS = 8
MODEL = ("model name", "CPU part")
"""The lines of /proc/cpuinfo that name the model, on x86 and on ARM."""
MEMORY_ON_CPU, MEMORY_ON_GPU = 2**24, 2**30
"""The most bytes that are written and read back."""
SHARE_ON_GPU = 0.25
"""The most of the free memory: other processes may start on the GPU at the same time."""
BLOCK_BYTES = 2**26
"""Bytes are compared in blocks, since a comparison needs memory, too."""
PATTERNS = (0x55, 0xAA)


def time_product(device: torch.device) -> float:
    """The seconds of one matrix product: the shortest of some, of the processor's time on a CPU,
    since other processes may use it as well.

    Raises `UnhealthyMachine` if a product is wrong. All values are small whole numbers, which
    half precision represents exactly: the factor has rank 1 and entries of 1 and -1.
    """
    is_gpu = device.type == "cuda"
    width = WIDTH_ON_GPU if is_gpu else WIDTH_ON_CPU
    generator = torch.Generator().manual_seed(1)
    signs = 1 - 2 * torch.randint(2, (2, width), generator=generator, device="cpu")
    dtype = torch.float16 if is_gpu else torch.float32
    column, row = signs.to(device, dtype)
    factor = torch.outer(column, row)
    expected = torch.outer(column * (signs[0] @ signs[1]).item(), row)
    product = torch.empty_like(factor)
    with torch.cuda.device(device) if is_gpu else nullcontext():  # events belong to one GPU
        times_s = [_seconds_of_product(factor, product) for _ in range(NUM_PRODUCTS)]
    if not torch.equal(product, expected):
        wrong = int((product != expected).sum())
        raise UnhealthyMachine(f"{wrong} of {width**2} entries of a matrix product are wrong")
    return min(times_s)


def check_memory(device: torch.device) -> None:
    """Write patterns to free memory of the device and read them back. Raises `UnhealthyMachine`."""
    if device.type == "cuda":
        size = min(MEMORY_ON_GPU, int(SHARE_ON_GPU * torch.cuda.mem_get_info(device)[0]))
    else:
        size = MEMORY_ON_CPU
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    for pattern in PATTERNS:
        memory.fill_(pattern)
        blocks = memory.split(BLOCK_BYTES)
        if any(bool((block != pattern).any()) for block in blocks):
            wrong = sum(int((block != pattern).sum()) for block in blocks)
            raise UnhealthyMachine(f"{wrong} of {size} bytes of memory lost what was written there")
    del memory, blocks
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def processor_of(device: torch.device) -> str:
    """The kind of processor, whose instances should be equally fast."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(MODEL)]
    return " ".join([platform.machine(), *names[:1]])


def identity_of(device: torch.device) -> str:
    """What identifies a GPU to NCCL, which refuses two ranks on one; empty for a CPU, and for a
    part of a GPU (MIG).

    Processes that are hosts of their own by `NCCL_HOSTID` may share a GPU.
    """
    if device.type != "cuda" or "MIG" in torch.cuda.get_device_name(device):
        return ""
    host = os.environ.get("NCCL_HOSTID")
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"{name} of host {host}" if host else name


def _seconds_of_product(factor: Tensor, product: Tensor) -> float:
    if factor.device.type != "cuda":
        began = time.thread_time()
        torch.mm(factor, factor, out=product)
        return time.thread_time() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    torch.mm(factor, factor, out=product)
    last.record()
    last.synchronize()
    elapsed_ms: float = first.elapsed_time(last)
    return elapsed_ms / 1000
