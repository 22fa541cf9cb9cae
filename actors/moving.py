"""Carry out one worker's part of a re-layout: keep, copy, send and receive; runs without Ray.

Pieces for one peer are coalesced into windows of at least `WINDOW_BYTES`; sender and receiver
derive the same windows, since both derive the same pieces in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from actors.torch_private import exchanged_together
from elastic.regions import Region
from elastic.specs import TensorSpec
from elastic.transfers import Piece, Transfers

WINDOW_BYTES = 4 * 2**20

Window = list[tuple[Tensor, int]]
"""Views into local tensors, each with its size in bytes, that travel as one message."""


@dataclass
class Moved:
    """What was counted where send is called."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_copied: int = 0


def move(
    specs: Sequence[TensorSpec],
    transfers: Transfers,
    old: Mapping[str, Tensor],
    group: ProcessGroup | None,
    device: torch.device,
    check: Callable[[], None],
) -> tuple[dict[str, Tensor], Moved]:
    """The local tensors under the new assignment, by name.

    Unchanged regions are the old tensors themselves; `old` stays whole, so that a failure in the
    middle starts over from it. `check` may raise between two rounds of messages.
    """
    new, moved = _allocate(specs, transfers, old, device), Moved()
    for copy in transfers.copies:
        spec = specs[copy.tensor]
        source = _view(old, spec, transfers.old_regions[copy.tensor], copy.region)
        target = _view(new, spec, transfers.new_regions[copy.tensor], copy.region)
        target.copy_(source)
        moved.bytes_copied += source.nbytes
    outgoing = _windows(
        transfers.sends,
        lambda p: _view(old, specs[p.tensor], transfers.old_regions[p.tensor], p.region),
    )
    incoming = _windows(
        transfers.receives,
        lambda p: _view(new, specs[p.tensor], transfers.new_regions[p.tensor], p.region),
    )
    for sends, receives in zip_longest(_rounds(outgoing), _rounds(incoming)):
        check()
        _exchange(group, sends or {}, receives or {}, moved, device)
    return new, moved


def stage(
    specs: Sequence[TensorSpec], transfers: Transfers, held: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The held tensors, those that do not stay in place moved to pinned host memory, one by one,
    so that a GPU never holds the old and the new part at once."""
    staged: dict[str, Tensor] = {}
    for index in sorted(transfers.old_regions):
        name = specs[index].name
        tensor = held.pop(name)
        if index not in transfers.kept and tensor.is_cuda:
            tensor = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        staged[name] = tensor
    return staged


def _exchange(
    group: ProcessGroup | None,
    sends: Mapping[int, Window],
    receives: Mapping[int, Window],
    moved: Moved,
    device: torch.device,
) -> None:
    """One message to and from each peer; both sides stand in the same round."""
    assert group is not None or not (sends or receives)
    if group is None:
        return
    landing: list[tuple[Tensor, Window]] = []
    works: list[Work] = []
    packed = [(peer, _pack(window, device)) for peer, window in sends.items()]
    with exchanged_together(group, device):
        for peer, window in receives.items():
            buffer = _buffer(window)
            landing.append((buffer, window))
            works.append(group.recv([buffer], peer, 0))
            moved.bytes_received += buffer.nbytes
        for peer, buffer in packed:
            works.append(group.send([buffer], peer, 0))
            moved.bytes_sent += buffer.nbytes
    for work in works:
        if device.type != "cuda":  # a coalesced exchange has been waited for as a whole
            work.wait()
    for buffer, window in landing:
        _unpack(buffer, window)


def _allocate(
    specs: Sequence[TensorSpec],
    transfers: Transfers,
    old: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    new: dict[str, Tensor] = {}
    for index, region in transfers.new_regions.items():
        spec = specs[index]
        if index in transfers.kept:
            new[spec.name] = old[spec.name].to(device)
        else:
            new[spec.name] = torch.empty(
                region.shape, dtype=getattr(torch, spec.dtype), device=device
            )
    return new


def _view(tensors: Mapping[str, Tensor], spec: TensorSpec, held: Region, wanted: Region) -> Tensor:
    """The part of a local tensor that is `wanted` of the logical one."""
    index = tuple(
        slice(begin - origin, begin - origin + size)
        for begin, origin, size in zip(wanted.offsets, held.offsets, wanted.shape, strict=True)
    )
    return tensors[spec.name][index]


def _windows(pieces: Sequence[Piece], view: Callable[[Piece], Tensor]) -> dict[int, list[Window]]:
    """The messages for each peer, in order."""
    windows: dict[int, list[Window]] = {}
    for piece in pieces:
        part = view(piece)
        queue = windows.setdefault(piece.peer, [[]])
        if sum(size for _, size in queue[-1]) >= WINDOW_BYTES:
            queue.append([])
        queue[-1].append((part, part.nbytes))
    return windows


def _rounds(windows: Mapping[int, list[Window]]) -> Iterator[dict[int, Window]]:
    """Round i holds window i of every peer that has one: no side waits for a later one."""
    peers = sorted(windows)
    num_rounds = max((len(windows[peer]) for peer in peers), default=0)
    for i in range(num_rounds):
        yield {peer: windows[peer][i] for peer in peers if i < len(windows[peer])}


def _buffer(window: Window) -> Tensor:
    """Where a window lands: its only piece itself if that lies in one run of memory."""
    if len(window) == 1 and window[0][0].is_contiguous():
        return _as_bytes(window[0][0])
    device = window[0][0].device
    return torch.empty(sum(size for _, size in window), dtype=torch.uint8, device=device)


def _pack(window: Window, device: torch.device) -> Tensor:
    """One message's bytes where the group sends from; staged pieces come back to the device."""
    if len(window) == 1:
        return _as_bytes(window[0][0].contiguous().to(device))
    return torch.cat([_as_bytes(part.contiguous().to(device)) for part, _ in window])


def _unpack(buffer: Tensor, window: Window) -> None:
    if len(window) == 1 and window[0][0].is_contiguous():
        return
    begin = 0
    for part, size in window:
        flat = buffer[begin : begin + size]
        # A slice of a byte buffer may begin where the wider type may not: the clone is aligned.
        part.copy_(flat.clone().view(part.dtype).view(part.shape))
        begin += size


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
