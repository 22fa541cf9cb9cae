"""What a worker uses of its machine."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import psutil
import torch


def sample(worker: str, process: psutil.Process) -> dict[str, Any]:
    """One line of `system.jsonl`; CPU use is since the last call, in percent of one core."""
    line: dict[str, Any] = {
        "time": time.time(),
        "worker": worker,
        "cpu_percent": process.cpu_percent(),
        "host_memory_bytes": process.memory_info().rss,
        "device_memory_bytes": None,
        "device_use_percent": None,
    }
    if torch.cuda.is_available():
        line["device_memory_bytes"] = torch.cuda.memory_allocated()
        if find_spec("pynvml"):
            line["device_use_percent"] = torch.cuda.utilization()
    return line
