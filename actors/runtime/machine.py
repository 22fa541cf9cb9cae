"""The machine under a worker: allocator and processor settings, resource usage."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""
CGROUP = Path("/sys/fs/cgroup")
LARGEST_TRIM, LARGEST_MMAP = 2**30, 2**25
"""Bytes; glibc accepts no larger mmap threshold."""


def keep_freed_memory() -> None:
    """Make the host's allocator keep freed memory, as a GPU's caching allocator does.

    Each step allocates the same again, and new pages cost time (docs/facts.md). Only glibc has this
    option; with other allocators nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, LARGEST_TRIM)
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP)


def flush_denormals() -> None:
    """Make the processor treat subnormal numbers as 0, on this thread.

    Adam's moments of a weight without gradient become subnormal after some hundred steps, and a CPU
    computes with subnormal numbers many times slower (docs/facts.md).
    """
    torch.set_flush_denormal(True)


def sample(worker: str, process: psutil.Process, data_wait_s: float) -> dict[str, Any]:
    """One line of `system.jsonl`; CPU usage is since the last call, in percent of one core."""
    line: dict[str, Any] = {
        "time": time.time(),
        "worker": worker,
        "cpu_percent": process.cpu_percent(),
        "host_memory_bytes": process.memory_info().rss,
        "host_peak_bytes": host_peak_bytes(),
        "device_memory_bytes": None,
        "device_peak_bytes": None,
        "device_use_percent": None,
        "data_wait_s": data_wait_s,
    }
    if torch.cuda.is_available():
        line["device_memory_bytes"] = torch.cuda.memory_allocated()
        line["device_peak_bytes"] = torch.cuda.max_memory_allocated()
        with suppress(Exception):  # each vendor's library has its own; some GPUs lack the counter
            line["device_use_percent"] = torch.cuda.utilization()
    return line


def free_bytes(device: torch.device) -> int:
    """The free memory of a GPU, or this CPU slot's share of the free memory of the host."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        unallocated: int = torch.cuda.mem_get_info(device)[0]
        return unallocated + unused
    free: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no limit: the file is absent, or says "max"
        limit = int((CGROUP / "memory.max").read_text())
        free = min(free, max(0, limit - int((CGROUP / "memory.current").read_text())))
    return free // (os.cpu_count() or 1)


def peak_bytes() -> int:
    """The peak memory of this process on the device that it trains on: its GPU, or the host."""
    on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return on_gpu or host_peak_bytes()


def host_peak_bytes() -> int:
    """The peak resident memory of this process, from Linux's VmHWM.

    Not `ru_maxrss`, which starts with the peak of the process that this one was forked from.
    """
    status = Path("/proc/self/status").read_text()
    [peak] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak.split()[1]) * 1024
