"""The device of `elastic plan`: by name from the table, or by its figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from elastic.planner.devices import DEVICES, DeviceSpec, device_of, named_device
from pipelines.errors import UserError


@dataclass(frozen=True)
class DeviceFlags:
    """`--device` and the figures that replace those of the table; None: not given."""

    name: str | None = None
    memory_gb: float | None = None
    tflops: float | None = None
    memory_gb_s: float | None = None
    link_gb_s: float | None = None
    far_gb_s: float | None = None


def find_devices(flags: DeviceFlags) -> list[DeviceSpec]:
    """The devices, separated by commas; by default this machine's. Raises `UserError`."""
    for option, value in (
        ("--device-memory", flags.memory_gb),
        ("--device-flops", flags.tflops),
        ("--device-bandwidth", flags.memory_gb_s),
        ("--link-bandwidth", flags.link_gb_s),
        ("--far-bandwidth", flags.far_gb_s),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{option} {value:g}: give a number greater than 0")
    if flags.name is None:
        return [_with_figures(_own_device(), flags)]
    names = [name.strip() for name in flags.name.split(",") if name.strip()]
    if not names:
        raise UserError("--device is empty; give a name such as H100-80GB, or leave it out")
    return [_with_figures(_device(name, flags), flags) for name in names]


def _device(name: str, flags: DeviceFlags) -> DeviceSpec:
    device = named_device(name)
    if device is not None:
        return device
    if flags.memory_gb is None or flags.tflops is None:
        known = ", ".join(known.name for known in DEVICES)
        raise UserError(
            f"--device {name}: not in the table ({known}); give --device-memory GB and "
            "--device-flops TFLOPS for it"
        )
    return DeviceSpec(name)


def _own_device() -> DeviceSpec:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device = device_of(properties.name) or DeviceSpec(properties.name)
        return replace(device, memory_gb=properties.total_memory / 1e9)
    own = named_device("cpu")
    assert own is not None
    return own


def _with_figures(device: DeviceSpec, flags: DeviceFlags) -> DeviceSpec:
    return replace(
        device,
        memory_gb=flags.memory_gb or device.memory_gb,
        half_tflops=flags.tflops or device.half_tflops,
        full_tflops=flags.tflops or device.full_tflops,
        memory_gb_s=flags.memory_gb_s or device.memory_gb_s,
        node_gb_s=flags.link_gb_s or device.node_gb_s,
        far_gb_s=flags.far_gb_s or device.far_gb_s,
    )
