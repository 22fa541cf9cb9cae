"""A measurement of the bandwidth between workers, taken once when a run begins."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from actors.distributed.backends.torch_groups_private import PeerMessage, exchange_all
from actors.distributed.stall import wait_for

MESSAGE_BYTES = 4 * 2**20


def measure_bandwidths(
    group: ProcessGroup, device: torch.device, check: Callable[[], None]
) -> list[tuple[int, float]]:
    """(Sending rank, bytes a second) for transfers to this rank; all ranks measure at once.

    The distances are 1, 2, 4, ..., as in the groups of a layout. So they include links within a
    node and, if there are several nodes, between them. `check` may raise between two distances.
    """
    num_ranks, rank = group.size(), group.rank()
    bandwidths, distance = [], 1
    outgoing = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    arriving = torch.empty_like(outgoing)
    while distance < num_ranks:
        check()
        source = (rank - distance) % num_ranks
        target = (rank + distance) % num_ranks
        _shift(group, outgoing[:1], arriving[:1], source, target)  # connects and synchronizes
        began = time.perf_counter()
        _shift(group, outgoing, arriving, source, target)
        bandwidths.append((source, MESSAGE_BYTES / (time.perf_counter() - began)))
        distance *= 2
    return bandwidths


def _shift(
    group: ProcessGroup, outgoing: torch.Tensor, arriving: torch.Tensor, source: int, target: int
) -> None:
    device = outgoing.device
    receives, sends = [PeerMessage(arriving, source, 0)], [PeerMessage(outgoing, target, 0)]
    for work in exchange_all(group, device, receives, sends):
        wait_for(work)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
