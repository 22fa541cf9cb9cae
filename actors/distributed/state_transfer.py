"""State transfer: one worker's part of a reshard, by keeping, copying, sending and receiving.

Pieces for one peer are coalesced into windows, and a large piece is cut into several. Sender and
receiver derive the same windows, since both derive the same pieces in the same order. The exchange
goes by steps: in the steps of shift s a worker sends to the s-th worker after it and receives from
the s-th before it, one window each way. All workers take the steps in this order. So no cyclic wait
can arise, and few windows are packed at a time, however many peers there are. On Gloo, windows
that need no packing are sent from the beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from actors.distributed.stall import wait_for
from actors.distributed.torch_private import coalesced_exchange
from actors.host_memory.host_copy import HostCopy, copy_tensors
from actors.host_memory.host_ring import HostRing, TensorPair, ring_for
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.transfers import Piece, Transfers

WINDOW_BYTES = {"cpu": 2 * 2**20, "cuda": 4 * 2**20}
"""Pieces that are not sent alone share windows of at least this size."""
LARGEST_BYTES = {kind: 2 * size for kind, size in WINDOW_BYTES.items()}
"""The largest window: a larger piece is cut into several."""
ALONE_BYTES = {"cpu": 2**18, "cuda": WINDOW_BYTES["cuda"]}
"""A piece of at least this size is sent alone. If many are under way, Gloo takes 15 % longer for
such messages than for large ones, which is less than packing takes; a GPU packs in no time."""
AHEAD = 8
"""How many steps with packed windows are under way at once on Gloo. With half as many, of twice the
size, a packed exchange on two cores took 1.1 times as long."""


@dataclass
class Moved:
    """Bytes moved, counted where the transfers are issued."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_copied: int = 0


@dataclass
class TransferWindow:
    """One message to or from a peer: views into local tensors, all of one dtype.

    `number` is its index among the messages of this pair of workers.
    """

    peer: int
    number: int
    parts: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def is_contiguous(self) -> bool:
        """Whether it is one contiguous piece of memory, so that it needs no packing."""
        return len(self.parts) == 1 and self.parts[0].is_contiguous()

    def within(self, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part, and its view of a buffer into which the parts are packed."""
        typed, begin = buffer.view(self.parts[0].dtype), 0
        for part in self.parts:
            end = begin + part.numel()
            yield part, typed[begin:end].view(part.shape)
            begin = end


TensorPieces = Mapping[int, Mapping[str, Tensor]]
"""What a worker holds of the old assignment: local tensors by name, by old world rank."""

TransferStep = tuple[TransferWindow | None, TransferWindow | None]
"""The outgoing and the incoming window of one step."""


def move(
    specs: Sequence[TensorSpec],
    transfers: Transfers,
    old: TensorPieces,
    group: ProcessGroup | None,
    device: torch.device,
    check: Callable[[], None],
) -> tuple[dict[str, Tensor], Moved]:
    """The local tensors under the new assignment, by name.

    Unchanged regions are the old tensors themselves. `old` stays complete, so that a failed
    transfer can be repeated. `check` may raise between two steps of the exchange.
    """
    new, moved = _allocate(specs, transfers, old, device), Moved()

    def source_of(piece: Piece) -> Tensor:
        held = old[piece.part][specs[piece.tensor].name]
        return _view(held, transfers.old_regions[piece.part][piece.tensor], piece.region)

    def target_of(piece: Piece) -> Tensor:
        return _view(
            new[specs[piece.tensor].name], transfers.new_regions[piece.tensor], piece.region
        )

    outgoing = _windows(specs, transfers.sends, source_of, device.type)
    incoming = _windows(specs, transfers.receives, target_of, device.type)
    exchange = None
    if outgoing or incoming:
        assert group is not None
        exchange = _Exchange(group, device, moved, check)
        exchange.begin(_steps(group, outgoing, incoming))
    pairs: list[TensorPair] = []
    for copy in transfers.copies:
        name, held = specs[copy.tensor].name, transfers.old_regions[copy.part][copy.tensor]
        source = _view(old[copy.part][name], held, copy.region)
        target = _view(new[name], transfers.new_regions[copy.tensor], copy.region)
        pairs.append((source, target))
        moved.bytes_copied += source.nbytes
    copy_tensors(pairs)
    if exchange is not None:
        exchange.finish()
    return new, moved


def stage(
    specs: Sequence[TensorSpec],
    transfers: Transfers,
    held: dict[str, Tensor],
    ring: HostRing | None = None,
) -> dict[str, Tensor]:
    """Move the held tensors that do not stay in place from the GPU to host memory.

    So a GPU never holds the old and the new part at once. Returns all held tensors, and empties
    `held` unless it raises. `ring`: as for `HostCopy`.
    """
    ring = ring or ring_for(held.values())
    indices = {specs[index].name: index for index in sorted(transfers.own_regions)}
    staged = {name: held[name] for name in indices}
    if ring is not None:
        moving = [
            name
            for name, index in indices.items()
            if index not in transfers.kept and ring.engine.owns(held[name])
        ]
        sources = [staged[name] for name in moving]
        staged.update(zip(moving, HostCopy(sources, ring).to_host(sources), strict=True))
    for name in staged:
        del held[name]
    return staged


class _Exchange:
    """All messages of one worker in one reshard."""

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        moved: Moved,
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self._is_gloo = device.type != "cuda"
        num_slots = AHEAD if self._is_gloo else 1
        self._slots = deque(_Slot(group, device, moved) for _ in range(num_slots))
        self._early = _Slot(group, device, moved)
        self._steps: list[TransferStep] = []

    def begin(self, steps: Iterator[TransferStep]) -> None:
        """On Gloo, start all contiguous windows; the others are left to `finish`.

        NCCL would run these in order, and the two sides may differ in what needs packing.
        """
        for step in steps:
            if self._is_gloo:
                outgoing, incoming = (w if w and w.is_contiguous else None for w in step)
                self._early.begin(outgoing, incoming)
                step = (None if outgoing else step[0], None if incoming else step[1])
            if any(step):
                self._steps.append(step)

    def finish(self) -> None:
        """Run the steps in order, on Gloo several at once; on NCCL only the GPU waits for them."""
        for step in self._steps:
            self._check()
            self._slots[0].finish()
            self._slots[0].begin(*step)
            self._slots.rotate(-1)
        for slot in (*self._slots, self._early):
            self._check()
            slot.finish()


@dataclass
class _Slot:
    """A step under way, with one buffer for each direction, which the next step reuses."""

    group: ProcessGroup
    device: torch.device
    moved: Moved
    buffers: dict[str, Tensor] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)
    to_unpack: tuple[TransferWindow, Tensor] | None = None

    def begin(self, outgoing: TransferWindow | None, incoming: TransferWindow | None) -> None:
        message = self._pack(outgoing) if outgoing else None
        with coalesced_exchange(self.group, self.device):
            if incoming:
                buffer = self._receive_buffer(incoming)
                self.works.append(self.group.recv([buffer], incoming.peer, incoming.number))
                self.moved.bytes_received += buffer.nbytes
            if outgoing and message is not None:
                self.works.append(self.group.send([message], outgoing.peer, outgoing.number))
                self.moved.bytes_sent += message.nbytes

    def finish(self) -> None:
        """Wait for the step's transfers, and unpack the received window."""
        if self.device.type != "cuda":  # a coalesced exchange has already been waited for
            for work in self.works:
                wait_for(work)
        self.works.clear()
        if self.to_unpack is not None:
            window, buffer = self.to_unpack
            for part, packed in window.within(buffer):
                part.copy_(packed)
        self.to_unpack = None

    def _pack(self, window: TransferWindow) -> Tensor:
        """A window's bytes on the group's device; staged parts are copied back to it."""
        if window.is_contiguous and window.parts[0].device.type == self.device.type:
            return _as_bytes(window.parts[0])
        buffer = self._buffer("outgoing", window)
        copy_tensors(list(window.within(buffer)))
        return buffer

    def _receive_buffer(self, window: TransferWindow) -> Tensor:
        """The memory that receives a window: its only part if that is contiguous."""
        if window.is_contiguous:
            return _as_bytes(window.parts[0])
        buffer = self._buffer("incoming", window)
        self.to_unpack = (window, buffer)
        return buffer

    def _buffer(self, direction: str, window: TransferWindow) -> Tensor:
        if direction not in self.buffers:
            self.buffers[direction] = torch.empty(
                LARGEST_BYTES[self.device.type], dtype=torch.uint8, device=self.device
            )
        return self.buffers[direction][: window.num_bytes]


def _steps(
    group: ProcessGroup,
    outgoing: Mapping[int, list[TransferWindow]],
    incoming: Mapping[int, list[TransferWindow]],
) -> Iterator[TransferStep]:
    """The windows that this worker sends and receives in each step."""
    me, num_peers = group.rank(), group.size()
    for shift in range(1, num_peers):
        after, before = (me + shift) % num_peers, (me - shift) % num_peers
        yield from zip_longest(outgoing.get(after, ()), incoming.get(before, ()))


def _windows(
    specs: Sequence[TensorSpec],
    pieces: Sequence[Piece],
    view_of: Callable[[Piece], Tensor],
    device_type: str,
) -> dict[int, list[TransferWindow]]:
    """The messages for each peer, in order; `view_of` gives the memory of a piece."""
    alone_bytes, window_bytes = ALONE_BYTES[device_type], WINDOW_BYTES[device_type]
    largest_bytes = LARGEST_BYTES[device_type]
    windows: dict[int, list[TransferWindow]] = {}
    shared: dict[tuple[int, str], TransferWindow] = {}
    for piece in pieces:
        spec, region, peer = specs[piece.tensor], piece.region, piece.peer
        is_alone = region.num_elements * spec.itemsize_bytes >= alone_bytes
        for block in _blocks(region, largest_bytes // spec.itemsize_bytes):
            window = None if is_alone else shared.get((peer, spec.dtype))
            if window is None or window.num_bytes >= window_bytes:
                queue = windows.setdefault(peer, [])
                window = TransferWindow(peer, len(queue))
                queue.append(window)
                if not is_alone:
                    shared[peer, spec.dtype] = window
            part = view_of(piece._replace(region=block))
            window.parts.append(part)
            window.num_bytes += part.nbytes
    return windows


def _blocks(region: Region, max_elements: int) -> Iterator[Region]:
    """A region, halved along its outermost dims until no block exceeds `max_elements`."""
    if region.num_elements <= max_elements:
        yield region
        return
    dim = next(dim for dim, size in enumerate(region.shape) if size > 1)
    for index in range(2):
        yield from _blocks(region.chunk(dim, 2, index), max_elements)


def _allocate(
    specs: Sequence[TensorSpec],
    transfers: Transfers,
    old: TensorPieces,
    device: torch.device,
) -> dict[str, Tensor]:
    new: dict[str, Tensor] = {}
    for index, region in transfers.new_regions.items():
        spec = specs[index]
        if index in transfers.kept:
            assert transfers.own_part is not None
            new[spec.name] = old[transfers.own_part][spec.name].to(device)
        else:
            new[spec.name] = torch.empty(
                region.shape, dtype=getattr(torch, spec.dtype), device=device
            )
    return new


def _view(local: Tensor, held: Region, wanted: Region) -> Tensor:
    """The view of a local tensor (region `held`) that is the region `wanted`."""
    strides = local.stride()
    begin = local.storage_offset()
    for offset, origin, stride in zip(wanted.offsets, held.offsets, strides, strict=True):
        begin += (offset - origin) * stride
    return local.as_strided(wanted.shape, strides, begin)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
