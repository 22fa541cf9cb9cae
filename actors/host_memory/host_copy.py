"""One copy of the state to host memory, during which training goes on until its next apply."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from actors.host_memory.copy_engine import CopyEvent
from actors.host_memory.host_ring import HostRing, TensorPair, ring_for
from elastic.geometry.tensor_specs import TensorSpec


def clone_buffers(specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the state, by name, that can be copied while the next step computes.

    A forward pass may change buffers, and nothing else: so buffers are cloned here.
    """
    buffers = {spec.name for spec in specs if spec.kind == "buffer"}
    return {n: t.detach().clone() if n in buffers else t for n, t in tensors.items()}


class CopyStopped(Exception):
    """The copy was broken off: its generation has ended."""


class HostCopy:
    """The training thread creates it when the tensors have the values to copy; any thread runs it.

    Tensors of a GPU pass through the process's `HostRing`, those in host memory are copied as they
    are.
    """

    def __init__(self, sources: Collection[Tensor], ring: HostRing | None = None) -> None:
        """`ring`: that of the sources' device; by default this process's, if they are on a GPU."""
        self._ring = ring or ring_for(sources)
        self._ready = self._ring.engine.record_compute() if self._ring else None
        self._issued = threading.Event()
        self._last: CopyEvent | None = None
        self._is_stopped = False

    def run(self, pairs: Collection[TensorPair]) -> None:
        """Copy each source to its target in host memory; they are complete when this returns.

        Raises `CopyStopped`. Whatever it raises, nothing reads the sources any more.
        """
        try:
            self._copy(pairs)
        finally:
            self._issued.set()

    def to_host(self, sources: Collection[Tensor]) -> list[Tensor]:
        """Like `run`, with new tensors as the targets."""
        try:
            targets = [torch.empty_like(source.detach(), device="cpu") for source in sources]
            self._copy(list(zip(sources, targets, strict=True)))
        finally:
            self._issued.set()
        return targets

    def stop(self) -> None:
        """Break off a copy out of a GPU at its next slot; `run` raises `CopyStopped`."""
        self._is_stopped = True

    def hold_changes(self, timeout_s: float | None = None) -> bool:
        """Called by the training thread before the sources change; False after `timeout_s`.

        Copies out of host memory are complete when this returns. Those out of a GPU have only been
        issued, and the GPU's compute stream waits for them, not the host.
        """
        if not self._issued.wait(timeout_s):
            return False
        if self._ring is not None and self._last is not None:
            self._ring.engine.hold_compute(self._last)
        return True

    def _copy(self, pairs: Collection[TensorPair]) -> None:
        if self._ring is None or self._ready is None:
            _copy_directly(pairs)
            return
        owns = self._ring.engine.owns
        on_host = [pair for pair in pairs if not owns(pair[0])]
        if on_host:  # the compute stream may still write to offloaded tensors
            self._ready.synchronize()
            _copy_directly(on_host)
        on_device = [pair for pair in pairs if owns(pair[0])]
        self._ring.download(on_device, self._ready, self._note_issued, self._check)

    def _note_issued(self, last: CopyEvent | None) -> None:
        self._last = last
        self._issued.set()

    def _check(self) -> None:
        if self._is_stopped:
            raise CopyStopped


def copy_tensors(pairs: Collection[TensorPair], ring: HostRing | None = None) -> None:
    """Copy each source to its target, from host memory to a GPU through that GPU's ring.

    Later work of the calling thread's compute stream sees the targets complete. `ring`: as for
    `HostCopy`.
    """
    ring = ring or ring_for(target for _, target in pairs)
    uploads = []
    for source, target in pairs:
        if ring is None or ring.engine.owns(source) or not ring.engine.owns(target):
            target.copy_(source)
        else:
            uploads.append((source, target))
    if ring is not None and uploads:
        ring.upload(uploads)


def _copy_directly(pairs: Iterable[TensorPair]) -> None:
    for source, target in pairs:
        target.copy_(source.detach())
