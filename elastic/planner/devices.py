"""Devices: peak operations, memory and link bandwidths by name, from the makers' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One worker's device: dense peaks, memory and links.

    `half_tflops` are matrix products in bfloat16 and float16, `full_tflops` those in float32
    without TF32 (10^12 operations a second). Sizes are in 10^9 bytes, bandwidths in 10^9 bytes a
    second: `memory_gb_s` of the memory, `node_gb_s` from one worker to another of its node, and
    `far_gb_s` to a worker of another node. A node has `per_node` devices. A collective takes at
    least `latency_us` (10^-6 s), and the host issues an operation in `issue_us`. 0: not known.
    """

    name: str
    half_tflops: float = 0.0
    full_tflops: float = 0.0
    memory_gb: float = 0.0
    memory_gb_s: float = 0.0
    node_gb_s: float = 0.0
    far_gb_s: float = 0.0
    per_node: int = 8
    latency_us: float = 20.0
    issue_us: float = 8.0

    def peak_flops(self, dtype: str) -> float | None:
        """The most operations a second in a data type, or None if that is not known."""
        tflops = {"bfloat16": self.half_tflops, "float16": self.half_tflops}
        return (tflops | {"float32": self.full_tflops}).get(dtype, 0.0) * 1e12 or None


DEVICES = (
    DeviceSpec("B200", 2250, 80, 180, 8000, 900, 50),
    DeviceSpec("B100", 1750, 60, 180, 8000, 900, 50),
    DeviceSpec("GH200", 989, 67, 96, 4000, 450, 50, per_node=1),
    DeviceSpec("H200", 989, 67, 141, 4800, 450, 50),
    DeviceSpec("H100 PCIe", 756, 51, 80, 2000, 50, 12.5),
    DeviceSpec("H100 NVL", 835, 60, 94, 3900, 50, 12.5),
    DeviceSpec("H100", 989, 67, 80, 3350, 450, 50),
    DeviceSpec("H800", 989, 67, 80, 3350, 200, 50),
    DeviceSpec("A100", 312, 19.5, 80, 2039, 300, 25),
    DeviceSpec("A800", 312, 19.5, 80, 2039, 200, 25),
    DeviceSpec("A30", 165, 10.3, 24, 933, 25, 3, per_node=4),
    DeviceSpec("A10G", 70, 35, 24, 600, 25, 3, per_node=4),
    DeviceSpec("A10", 125, 31.2, 24, 600, 25, 3, per_node=4),
    DeviceSpec("L40S", 362, 91.6, 48, 864, 25, 6),
    DeviceSpec("L40", 181, 90.5, 48, 864, 25, 6),
    DeviceSpec("L4", 121, 30.3, 24, 300, 25, 3),
    DeviceSpec("RTX 4090", 165.2, 82.6, 24, 1008, 20, 1.25),
    DeviceSpec("RTX 3090", 71, 35.6, 24, 936, 20, 1.25),
    DeviceSpec("MI300X", 1307, 163, 192, 5300, 64, 50),
    DeviceSpec("MI325X", 1307, 163, 256, 6000, 64, 50),
    DeviceSpec("MI250X", 191.5, 23.9, 64, 1600, 50, 25),
    DeviceSpec("cpu", 0.05, 0.05, 8, 10, 2, 1.25, per_node=16, latency_us=200),
)
"""The first device whose name is a part of a GPU's name is its kind. Of the MI250X each die is a
device. A `cpu` worker is one core of a cloud machine, roughly."""


def device_of(product_name: str) -> DeviceSpec | None:
    """The device that a driver calls by this name, such as `NVIDIA H100 80GB HBM3`.

    None for an unknown device and for a part of a GPU.
    """
    if "MIG" in product_name:
        return None
    for device in DEVICES:
        if re.search(rf"\b{re.escape(device.name)}\b", product_name, re.IGNORECASE):
            return device
    return None


def named_device(name: str) -> DeviceSpec | None:
    """The device of this name in the table; `A100-40GB` is an A100 with that memory."""
    words = re.sub(r"[-_ ]+", " ", name).strip().casefold()
    memory = re.fullmatch(r"(.+) ([0-9]{1,4}) ?gb", words)
    for device in DEVICES:
        if device.name.casefold() == (memory[1] if memory else words):
            return replace(device, name=name, memory_gb=float(memory[2])) if memory else device
    return None
