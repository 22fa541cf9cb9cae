"""Windows: the messages of a reshard between a pair of workers.

Pieces for one peer are coalesced into windows, and a large piece is cut into several. Sender and
receiver derive the same windows, since both derive the same pieces in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.transfers import Piece

WINDOW_BYTES = {"cpu": 2 * 2**20, "cuda": 4 * 2**20}
"""Pieces that are not sent alone share windows of at least this size."""
LARGEST_BYTES = {"cpu": 4 * 2**20, "cuda": 32 * 2**20}
"""The largest window: a larger piece is cut into several."""
ALONE_BYTES = {"cpu": 2**18, "cuda": WINDOW_BYTES["cuda"]}
"""A piece of at least this size is sent alone. If many are under way, Gloo takes 15 % longer for
such messages than for large ones, which is less than packing takes; a GPU packs in no time."""


Windows = dict[int, list["TransferWindow"]]
"""The windows for each peer, in order."""


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


def windows_of(
    specs: Sequence[TensorSpec],
    pieces: Sequence[Piece],
    view_of: Callable[[Piece], Tensor],
    device_type: str,
) -> Windows:
    """The messages for each peer, in order; `view_of` gives the memory of a piece."""
    alone_bytes, window_bytes = ALONE_BYTES[device_type], WINDOW_BYTES[device_type]
    largest_bytes = LARGEST_BYTES[device_type]
    windows: Windows = {}
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
