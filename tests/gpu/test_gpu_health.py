"""The checks of a machine on its GPU."""

from __future__ import annotations

import torch
from one_gpu import NEEDS_GPU

from actors.health.checks import MachineCheck
from actors.health.device_errors import DeviceErrors
from actors.health.health_options import HealthOptions
from actors.runtime.faults import FaultInjector
from actors.runtime.network import ANYWHERE
from elastic.geometry.topology import Place

pytestmark = NEEDS_GPU

DEVICE = torch.device("cuda")


def test_healthy_gpu_passes_and_is_known_by_its_identity() -> None:
    options = HealthOptions(slow_factor=4.0, device_errors=True)
    faults = FaultInjector("w0")
    check = MachineCheck(options, DEVICE, faults, "127.0.0.1", ANYWHERE, b"secret")
    report = check.run(Place("here"), ())
    assert 1e-6 < report.product_s < 0.1
    assert report.processor == torch.cuda.get_device_name(DEVICE)
    assert report.device_id.startswith("GPU-")


def test_working_gpu_reports_no_new_error() -> None:
    errors = DeviceErrors(DEVICE)
    assert [errors.new() for _ in range(3)] == ["", "", ""]
