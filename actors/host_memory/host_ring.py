"""A ring of pinned slots, through which all bytes between a GPU and host memory pass.

One ring serves a whole process: snapshots, checkpoint parts and resharding. It is allocated once,
since pinning memory is slow and blocks the GPU. A copy out of the device fills slots on a side
stream, each followed by an event, and threads of the ring empty each slot once its event is
complete: one thread copies more slowly than the link to the device. Neither the host nor the
compute stream of the device waits for anything else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from actors.host_memory.copy_engine import CopyEngine, CopyEvent, CudaEngine
from actors.host_memory.daemon_pool import DaemonPool

NUM_SLOTS = 4
SLOT_BYTES = 16 * 2**20
"""A copy of this size runs at the full speed of PCIe; four make up for a consumer that pauses."""
ALIGNED_BYTES = 64
"""Tensors that share a slot begin at multiples of this, which any dtype may."""

TensorPair = tuple[Tensor, Tensor]
"""The source and the target of a copy, of one shape and dtype."""


class SlotPiece(NamedTuple):
    """A block of a tensor within a slot."""

    source: Tensor
    target: Tensor
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.source.nbytes


@dataclass
class RingSlot:
    """Host memory of the ring, in use by one thread at a time."""

    memory: Tensor | None = None
    event: CopyEvent | None = None
    """Once it is complete, the device neither reads nor writes this memory any more."""

    def view_of(self, piece: SlotPiece) -> Tensor:
        """The memory of a piece, in its dtype and shape."""
        assert self.memory is not None
        flat = self.memory[piece.begin : piece.end].view(piece.source.dtype)
        return flat.view(piece.source.shape)


class HostRing:
    """Copies in both directions; any number of threads may copy at once."""

    def __init__(
        self, engine: CopyEngine, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self.engine = engine
        self._slot_bytes = slot_bytes
        self._free = deque(RingSlot() for _ in range(num_slots))
        self._waiting: deque[object] = deque()
        """One object for each thread that waits for a slot, first come, first served."""
        self._changed = threading.Condition()
        self._emptiers = DaemonPool(num_slots, "host ring")

    def download(
        self,
        pairs: Iterable[TensorPair],
        ready: CopyEvent,
        on_issued: Callable[[CopyEvent | None], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy tensors of the device, as they are after `ready`, to host memory.

        Returns once all targets are complete. `on_issued` is called earlier, with an event after
        which the sources may change (None: there was nothing to copy). `check` may raise between
        two slots. After any exception nothing reads the sources any more.
        """
        emptying: deque[Future[None]] = deque()
        event = None
        try:
            self.engine.wait_for_compute(ready)
            for pieces in _batches(pairs, self._slot_bytes):
                check()
                while emptying and emptying[0].done():
                    emptying.popleft().result()
                slot = self._take()
                event = self._fill(slot, pieces)
                emptying.append(self._emptiers.submit(partial(self._empty, slot, pieces)))
            on_issued(event)
            for emptied in emptying:
                emptied.result()
        finally:
            wait(emptying)

    def upload(self, pairs: Iterable[TensorPair]) -> None:
        """Copy tensors of host memory to the device.

        Returns once all sources may change. Later work of the calling thread's compute stream sees
        the targets complete.
        """
        engine = self.engine
        engine.wait_for_compute(engine.record_compute())
        try:
            for pieces in _batches(pairs, self._slot_bytes):
                slot = self._take()
                try:
                    for piece in pieces:
                        slot.view_of(piece).copy_(piece.source)
                        engine.copy(piece.target, slot.view_of(piece))
                finally:
                    slot.event = engine.record_copies()
                    self._give_back(slot)
        finally:
            engine.hold_compute(engine.record_copies())

    def _take(self) -> RingSlot:
        """A slot that the device no longer uses."""
        with self._changed:
            ticket = object()
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._free and self._waiting[0] is ticket)
                slot = self._free.popleft()
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            if slot.event is not None:
                slot.event.synchronize()
            if slot.memory is None:
                slot.memory = self.engine.allocate(self._slot_bytes)
        except BaseException:
            self._give_back(slot)
            raise
        return slot

    def _give_back(self, slot: RingSlot) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def _fill(self, slot: RingSlot, pieces: list[SlotPiece]) -> CopyEvent:
        """Issue the copies of a batch. If one of them fails, wait for the others and give the slot
        back."""
        try:
            for piece in pieces:
                self.engine.copy(slot.view_of(piece), piece.source)
            slot.event = self.engine.record_copies()
        except BaseException:
            try:
                self.engine.record_copies().synchronize()
            finally:
                self._give_back(slot)
            raise
        return slot.event

    def _empty(self, slot: RingSlot, pieces: list[SlotPiece]) -> None:
        """Copy a filled slot to its targets, and give it back."""
        try:
            if slot.event is not None:
                slot.event.synchronize()
            for piece in pieces:
                piece.target.copy_(slot.view_of(piece))
        finally:
            self._give_back(slot)


def _batches(pairs: Iterable[TensorPair], slot_bytes: int) -> Iterator[list[SlotPiece]]:
    """The copies, cut and packed so that each batch fits a slot."""
    pieces: list[SlotPiece] = []
    end = 0
    for source, target in pairs:
        for block, place in _blocks(source.detach(), target, slot_bytes // source.itemsize):
            begin = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES
            if pieces and begin + block.nbytes > slot_bytes:
                yield pieces
                pieces, begin = [], 0
            pieces.append(SlotPiece(block, place, begin))
            end = begin + block.nbytes
    if pieces:
        yield pieces


def _blocks(source: Tensor, target: Tensor, max_elements: int) -> Iterator[TensorPair]:
    """A tensor in blocks of at most `max_elements`: ranges of its memory where that is possible,
    else halves along its outermost dims."""
    if source.numel() <= max_elements:
        if source.numel():
            yield source, target
    elif source.is_contiguous() and target.is_contiguous():
        flat, place = source.view(-1), target.view(-1)
        yield from zip(flat.split(max_elements), place.split(max_elements), strict=True)
    else:
        dim = next(dim for dim, size in enumerate(source.shape) if size > 1)
        halves = zip(source.chunk(2, dim), target.chunk(2, dim), strict=True)
        for half, place in halves:
            yield from _blocks(half, place, max_elements)


_rings: dict[torch.device, HostRing] = {}
_lock = threading.Lock()


def ring_for(tensors: Iterable[Tensor]) -> HostRing | None:
    """This process's ring for the GPU that the tensors are on; None if all are in host memory."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    with _lock:
        if device not in _rings:
            _rings[device] = HostRing(CudaEngine(device))
        return _rings[device]
