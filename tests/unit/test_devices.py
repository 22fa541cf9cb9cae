"""The table of devices: names of users and of drivers, and peaks by data type."""

from __future__ import annotations

import pytest

from elastic.planner.devices import DEVICES, device_of, named_device


@pytest.mark.parametrize(
    ("name", "memory_gb"),
    [("H100", 80), ("H100-80GB", 80), ("a100-40gb", 40), ("L4", 24), ("rtx_4090", 24), ("cpu", 8)],
)
def test_device_is_found_by_name_and_memory(name: str, memory_gb: float) -> None:
    device = named_device(name)
    assert device is not None and device.memory_gb == memory_gb


def test_unknown_device_and_part_of_a_gpu_are_not_found() -> None:
    assert named_device("H1000") is None and named_device("80GB") is None
    assert device_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


def test_peak_depends_on_the_data_type() -> None:
    device = device_of("NVIDIA H100 80GB HBM3")
    assert device is not None
    assert device.peak_flops("bfloat16") == 989e12
    assert device.peak_flops("float32") == 67e12
    assert device.peak_flops("float64") is None


def test_each_device_has_all_figures() -> None:
    for device in DEVICES:
        figures = (device.half_tflops, device.full_tflops, device.memory_gb, device.memory_gb_s)
        assert min(*figures, device.node_gb_s, device.far_gb_s) > 0, device.name
        assert device.far_gb_s <= device.node_gb_s, device.name
