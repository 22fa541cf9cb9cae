"""Errors that a GPU reports through NVML, the library behind `nvidia-smi`.

Not every GPU has every counter. A query that it does not support counts as no error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pynvml  # type: ignore[import-untyped]
import torch

T = TypeVar("T")

BROKEN_HARDWARE = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "row remapping or page retirement",
    64: "failed row remapping or page retirement",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
}
"""Xids that point at the device; others, such as 13, 31 and 43, are mostly the program's."""
NUM_READINGS, BETWEEN_READINGS_S = 4, 0.5
"""A slowdown counts if all these readings show it: the clock changes when a program starts."""


class DeviceErrors:
    """The errors of one GPU; there are none on a CPU, or where NVML knows nothing of the device."""

    def __init__(self, device: torch.device, nvml: Any = pynvml) -> None:
        """`nvml` is the module of NVML's functions."""
        self._nvml = nvml
        self._handle: Any = None
        self._events: Any = None
        self._is_lost = False
        if device.type != "cuda":
            return
        with suppress(nvml.NVMLError):  # no driver, or a part of a GPU (MIG)
            nvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._num_ecc = self._num_uncorrected()
        if self._handle is not None:
            with suppress(nvml.NVMLError):
                events = nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(
                    self._handle, nvml.nvmlEventTypeXidCriticalError, events
                )
                self._events = events

    def lasting(self) -> str:
        """Why no training should begin on this device; empty if nothing speaks against it."""
        if self._handle is None:
            return ""
        if self._num_ecc:
            return f"{self._num_ecc} uncorrectable ECC errors since the GPU's last reset"
        return self._remapping() or self._lasting_slowdown()

    def new(self) -> str:
        """An error since the last call, or since the start; empty if there is none.

        A slowdown is none: if it matters, the worker is a straggler, and heat or power may slow
        down all workers alike.
        """
        if self._handle is None:
            return ""
        if xid := self._next_xid():
            return f"Xid {xid}: {BROKEN_HARDWARE[xid]}"
        before, self._num_ecc = self._num_ecc, self._num_uncorrected()
        if self._num_ecc > before:
            return f"{self._num_ecc - before} new uncorrectable ECC errors"
        if self._is_lost:
            return "the GPU is lost"
        return self._remapping()

    def _num_uncorrected(self) -> int:
        nvml = self._nvml
        kind, since_reset = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return self._read(nvml.nvmlDeviceGetTotalEccErrors, 0, kind, since_reset)

    def _remapping(self) -> str:
        _, _, is_pending, has_failed = self._read(
            self._nvml.nvmlDeviceGetRemappedRows, (0, 0, 0, 0)
        )
        if has_failed:
            return "a memory row could not be remapped: the GPU has to be replaced"
        return "a memory row waits to be remapped: the GPU has to be reset" if is_pending else ""

    def _lasting_slowdown(self) -> str:
        for number in range(NUM_READINGS):
            time.sleep(BETWEEN_READINGS_S if number else 0.0)
            if not (slowdown := self._slowdown()):
                return ""
        return slowdown

    def _slowdown(self) -> str:
        nvml = self._nvml
        reasons = self._read(nvml.nvmlDeviceGetCurrentClocksEventReasons, 0)
        names = {
            nvml.nvmlClocksEventReasonHwThermalSlowdown: "it is too hot",
            nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "its power supply is too weak",
            nvml.nvmlClocksEventReasonHwSlowdown: "heat or power",
        }
        causes = [name for bit, name in names.items() if reasons & bit]
        return f"the hardware slows the GPU down: {causes[0]}" if causes else ""

    def _next_xid(self) -> int:
        """The next Xid of broken hardware that has been reported; 0 if there is none."""
        nvml = self._nvml
        while self._events is not None:
            try:
                xid = int(nvml.nvmlEventSetWait_v2(self._events, 0).eventData)
            except nvml.NVMLError_Timeout:
                return 0
            except nvml.NVMLError:  # if the GPU is lost, the counters say so, too
                self._events = None
                return 0
            if xid in BROKEN_HARDWARE:
                return xid
        return 0

    def _read(self, query: Callable[..., T], default: T, *arguments: Any) -> T:
        if self._handle is None:
            return default
        try:
            return query(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            self._is_lost = error.value == self._nvml.NVML_ERROR_GPU_IS_LOST
            return default
