"""What a `HostRing` needs of a device: pinned memory, copies on a side stream, and events."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class CopyEvent(Protocol):
    """A point in a stream of the device."""

    def synchronize(self) -> None:
        """Block the calling thread, and nothing else, until the stream has passed this point."""


class CopyEngine(Protocol):
    """Copies on one side stream, next to the compute stream of the calling thread.

    No method but `allocate` blocks: each adds work to a stream. All may be called in any thread.
    """

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is in the memory of the device."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Host memory (bytes) that the device reads and writes by itself."""

    def record_compute(self) -> CopyEvent:
        """The point that the compute stream of the calling thread has been given work up to."""

    def wait_for_compute(self, event: CopyEvent) -> None:
        """Later copies begin after `event`."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between the device and allocated host memory, on the side stream."""

    def record_copies(self) -> CopyEvent:
        """The point at which all copies so far are complete."""

    def hold_compute(self, event: CopyEvent) -> None:
        """Later work of the calling thread's compute stream begins after `event`."""


class CudaEngine:
    """Copies to and from one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def allocate(self, num_bytes: int) -> Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record_compute(self) -> torch.cuda.Event:
        return _record(torch.cuda.current_stream(self._device))

    def wait_for_compute(self, event: CopyEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record_copies(self) -> torch.cuda.Event:
        return _record(self._stream)

    def hold_compute(self, event: CopyEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event whose waiting thread sleeps: by default it would spin on a core."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
