"""State transfer: one worker's part of a reshard, by keeping, copying, sending and receiving.

`transfer_windows.py` has the messages, `exchange.py` the order in which they are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from actors.distributed.exchange import (
    Exchange,
    Moved,
    RoundExchange,
    SteppedExchange,
    Transport,
)
from actors.distributed.transfer_windows import windows_of
from actors.host_memory.host_copy import HostCopy, copy_tensors
from actors.host_memory.host_ring import HostRing, TensorPair, ring_for
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.transfers import Piece, Transfers

TensorPieces = Mapping[int, Mapping[str, Tensor]]
"""What a worker holds of the old assignment: local tensors by name, by old world rank."""


def move(
    specs: Sequence[TensorSpec],
    transfers: Transfers,
    old: TensorPieces,
    group: ProcessGroup | None,
    device: torch.device,
    check: Callable[[], None],
    exchange_type: type[Exchange] | None = None,
) -> tuple[dict[str, Tensor], Moved]:
    """The local tensors under the new assignment, by name; all values have arrived.

    Unchanged regions are the old tensors themselves. `old` stays complete, so that a failed
    transfer can be repeated. `check` may raise between two steps of the exchange, and is called
    after the last: an aborted transfer may have ended with garbage. `exchange_type` is by default
    that of the device's type.
    """
    new, moved = _allocate(specs, transfers, old, device), Moved()
    exchange_type = exchange_type or (RoundExchange if device.type == "cuda" else SteppedExchange)

    def source_of(piece: Piece) -> Tensor:
        held = old[piece.part][specs[piece.tensor].name]
        return _view(held, transfers.old_regions[piece.part][piece.tensor], piece.region)

    def target_of(piece: Piece) -> Tensor:
        return _view(
            new[specs[piece.tensor].name], transfers.new_regions[piece.tensor], piece.region
        )

    outgoing = windows_of(specs, transfers.sends, source_of, device.type)
    incoming = windows_of(specs, transfers.receives, target_of, device.type)
    exchange = None
    if outgoing or incoming:
        assert group is not None
        exchange = exchange_type(Transport(group, device, moved, check))
        exchange.begin(outgoing, incoming)
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
        check()
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
