"""A measurement of the bandwidth between workers, taken once when a run begins."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from actors.distributed.backends.torch_groups_private import PeerMessage, exchange_all
from actors.distributed.stall import wait_for

MESSAGE_BYTES = 4 * 2**20
USUAL_S = 0.004
"""An injected slow link takes a multiple of this."""
NUM_TRIES = 3
"""The fastest counts: a process that waits for a processor says nothing about its link."""


def measure_bandwidths(
    group: ProcessGroup, device: torch.device, check: Callable[[], None], slowed_by: float = 1.0
) -> list[tuple[int, float]]:
    """(Sending rank, bytes a second) for transfers to this rank; all ranks measure at once.

    The distances are 1, 2, 4, ..., as in the groups of a layout. So they include links within a
    node and, if there are several nodes, between them. `check` may raise between two distances.
    `slowed_by` is an injected fault.
    """
    num_ranks, rank = group.size(), group.rank()
    bandwidths, distance = [], 1
    outgoing = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    arriving = torch.empty_like(outgoing)
    while distance < num_ranks:
        check()
        source = (rank - distance) % num_ranks
        target = (rank + distance) % num_ranks
        _shift(group, outgoing[:1], arriving[:1], source, target)  # connects
        times_s: list[float] = []
        for _ in range(NUM_TRIES):
            # Together, else a slow link would delay the next message of its neighbours.
            wait_for(group.allreduce([torch.zeros(1, device=device)]))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            time.sleep((slowed_by - 1.0) * USUAL_S)
            arrived = _shift(group, outgoing, arriving, source, target)
            times_s.append(arrived - began)
        bandwidths.append((source, MESSAGE_BYTES / min(times_s)))
        distance *= 2
    return bandwidths


def _shift(
    group: ProcessGroup, outgoing: torch.Tensor, arriving: torch.Tensor, source: int, target: int
) -> float:
    """Send and receive; returns when the message had arrived, or on NCCL when both had."""
    device = outgoing.device
    receives, sends = [PeerMessage(arriving, source, 0)], [PeerMessage(outgoing, target, 0)]
    receiving, *sending = exchange_all(group, device, receives, sends)
    wait_for(receiving)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    arrived = time.perf_counter()
    for work in sending:
        wait_for(work)
    return arrived
