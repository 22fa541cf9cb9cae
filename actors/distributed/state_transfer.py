"""Carry out one worker's part of a re-layout: keep, copy, send and receive; runs without Ray.

Pieces for one peer are coalesced into windows, and large ones cut into several; sender and
receiver derive the same windows, since both derive the same pieces in the same order. The
exchange goes by steps: in those of shift s a worker sends to the s-th worker after it and
receives from the s-th before it, one window each way. All go through the steps in this order,
so that none waits for one that waits for it, and few windows are packed at a time however many
peers there are. On Gloo, what needs no packing is under way from the beginning.
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
from actors.distributed.torch_private import exchanged_together
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.transfers import Piece, Transfers

WINDOW_BYTES = {"cpu": 2 * 2**20, "cuda": 4 * 2**20}
"""Pieces that do not travel alone share windows of at least this size."""
LARGEST_BYTES = {kind: 2 * size for kind, size in WINDOW_BYTES.items()}
"""No window is larger: pieces that are travel as several."""
ALONE_BYTES = {"cpu": 2**18, "cuda": WINDOW_BYTES["cuda"]}
"""A piece of this size travels alone. Gloo takes 15 % longer for such messages than for large
ones if many are under way, which is less than to pack them; a GPU packs in no time."""
AHEAD = 8
"""So many steps with packed windows are under way at once on Gloo. With half as many, of twice
the size, a packed exchange on two cores took 1.1 of the time."""


@dataclass
class Moved:
    """What was counted where send is called."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_copied: int = 0


@dataclass
class TransferWindow:
    """One message to or from a peer: views into local tensors, all of one dtype.

    `number` is its place among the messages of this pair of workers.
    """

    peer: int
    number: int
    parts: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def is_one_run(self) -> bool:
        """Whether it lies in one run of memory as it is."""
        return len(self.parts) == 1 and self.parts[0].is_contiguous()

    def within(self, room: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part, and its place in a buffer where they lie one behind the other."""
        typed, begin = room.view(self.parts[0].dtype), 0
        for part in self.parts:
            end = begin + part.numel()
            yield part, typed[begin:end].view(part.shape)
            begin = end


TensorPieces = Mapping[int, Mapping[str, Tensor]]
"""What a worker has of the old assignment: local tensors by name, by old world rank."""

TransferStep = tuple[TransferWindow | None, TransferWindow | None]
"""What goes out and what comes in."""


def move(
    specs: Sequence[TensorSpec],
    transfers: Transfers,
    old: TensorPieces,
    group: ProcessGroup | None,
    device: torch.device,
    check: Callable[[], None],
) -> tuple[dict[str, Tensor], Moved]:
    """The local tensors under the new assignment, by name.

    Unchanged regions are the old tensors themselves; `old` stays whole, so that a failure in the
    middle starts over from it. `check` may raise between two steps of the exchange.
    """
    new, moved = _allocate(specs, transfers, old, device), Moved()

    def leaving(piece: Piece) -> Tensor:
        held = old[piece.part][specs[piece.tensor].name]
        return _view(held, transfers.old_regions[piece.part][piece.tensor], piece.region)

    def coming(piece: Piece) -> Tensor:
        return _view(
            new[specs[piece.tensor].name], transfers.new_regions[piece.tensor], piece.region
        )

    outgoing = _windows(specs, transfers.sends, leaving, device.type)
    incoming = _windows(specs, transfers.receives, coming, device.type)
    exchange = None
    if outgoing or incoming:
        assert group is not None
        exchange = _Exchange(group, device, moved, check)
        exchange.begin(_steps(group, outgoing, incoming))
    for copy in transfers.copies:
        name, held = specs[copy.tensor].name, transfers.old_regions[copy.part][copy.tensor]
        source = _view(old[copy.part][name], held, copy.region)
        target = _view(new[name], transfers.new_regions[copy.tensor], copy.region)
        target.copy_(source)
        moved.bytes_copied += source.nbytes
    if exchange is not None:
        exchange.finish()
    return new, moved


def stage(
    specs: Sequence[TensorSpec], transfers: Transfers, held: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The held tensors, those that do not stay in place moved to pinned host memory, one by one,
    so that a GPU never holds the old and the new part at once."""
    staged: dict[str, Tensor] = {}
    for index in sorted(transfers.own_regions):
        name = specs[index].name
        tensor = held.pop(name)
        if index not in transfers.kept and tensor.is_cuda:
            tensor = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        staged[name] = tensor
    return staged


class _Exchange:
    """All messages of one worker in one re-layout."""

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
        """On Gloo, send and receive what lies in one run of memory; the rest is left for later.

        NCCL would run these in order, and both sides do not agree on what needs packing.
        """
        for step in steps:
            if self._is_gloo:
                outgoing, incoming = (w if w and w.is_one_run else None for w in step)
                self._early.begin(outgoing, incoming)
                step = (None if outgoing else step[0], None if incoming else step[1])
            if any(step):
                self._steps.append(step)

    def finish(self) -> None:
        """The steps in order, some ahead on Gloo; NCCL's are waited for on the GPU alone."""
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
    """A step under way, with room for a window each way that the next one uses again."""

    group: ProcessGroup
    device: torch.device
    moved: Moved
    rooms: dict[str, Tensor] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)
    landed: tuple[TransferWindow, Tensor] | None = None

    def begin(self, outgoing: TransferWindow | None, incoming: TransferWindow | None) -> None:
        message = self._packed(outgoing) if outgoing else None
        with exchanged_together(self.group, self.device):
            if incoming:
                buffer = self._landing(incoming)
                self.works.append(self.group.recv([buffer], incoming.peer, incoming.number))
                self.moved.bytes_received += buffer.nbytes
            if outgoing and message is not None:
                self.works.append(self.group.send([message], outgoing.peer, outgoing.number))
                self.moved.bytes_sent += message.nbytes

    def finish(self) -> None:
        """Wait for what was begun, and take apart what has come."""
        if self.device.type != "cuda":  # a coalesced exchange has been waited for as a whole
            for work in self.works:
                wait_for(work)
        self.works.clear()
        if self.landed is not None:
            window, buffer = self.landed
            for part, place in window.within(buffer):
                part.copy_(place)
        self.landed = None

    def _packed(self, window: TransferWindow) -> Tensor:
        """A window's bytes where the group sends from; staged parts come back to the device."""
        if window.is_one_run and window.parts[0].device.type == self.device.type:
            return _as_bytes(window.parts[0])
        room = self._room("outgoing", window)
        for part, place in window.within(room):
            place.copy_(part)
        return room

    def _landing(self, window: TransferWindow) -> Tensor:
        """Where a window comes in: its only part itself if that lies in one run of memory."""
        if window.is_one_run:
            return _as_bytes(window.parts[0])
        room = self._room("incoming", window)
        self.landed = (window, room)
        return room

    def _room(self, direction: str, window: TransferWindow) -> Tensor:
        if direction not in self.rooms:
            self.rooms[direction] = torch.empty(
                LARGEST_BYTES[self.device.type], dtype=torch.uint8, device=self.device
            )
        return self.rooms[direction][: window.num_bytes]


def _steps(
    group: ProcessGroup,
    outgoing: Mapping[int, list[TransferWindow]],
    incoming: Mapping[int, list[TransferWindow]],
) -> Iterator[TransferStep]:
    """What this worker sends and receives in each step."""
    me, num_peers = group.rank(), group.size()
    for shift in range(1, num_peers):
        after, before = (me + shift) % num_peers, (me - shift) % num_peers
        yield from zip_longest(outgoing.get(after, ()), incoming.get(before, ()))


def _windows(
    specs: Sequence[TensorSpec],
    pieces: Sequence[Piece],
    memory: Callable[[Piece], Tensor],
    device_type: str,
) -> dict[int, list[TransferWindow]]:
    """The messages for each peer, in order; `memory` is where a piece lies."""
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
            part = memory(piece._replace(region=block))
            window.parts.append(part)
            window.num_bytes += part.nbytes
    return windows


def _blocks(region: Region, max_elements: int) -> Iterator[Region]:
    """A region, halved along its outermost dims until no block has more elements."""
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
    """The part of a local tensor that is `wanted` of the logical one."""
    strides = local.stride()
    begin = local.storage_offset()
    for offset, origin, stride in zip(wanted.offsets, held.offsets, strides, strict=True):
        begin += (offset - origin) * stride
    return local.as_strided(wanted.shape, strides, begin)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
