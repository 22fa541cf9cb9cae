"""How fast the links between workers are: measured once, when a run begins."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from actors.distributed.stall import wait_for
from actors.distributed.torch_private import exchanged_together

MESSAGE_BYTES = 4 * 2**20


def measure_bandwidths(
    group: ProcessGroup, device: torch.device, check: Callable[[], None]
) -> list[tuple[int, float]]:
    """Bytes a second from other ranks to this one, with the rank that sent, all ranks at once.

    At distances 1, 2, 4, ... as the groups of a layout have them: so links within a node, and out
    of it where there are several, are among them. `check` may raise between two distances.
    """
    num_ranks, rank = group.size(), group.rank()
    speeds, distance = [], 1
    outgoing = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    arriving = torch.empty_like(outgoing)
    while distance < num_ranks:
        check()
        source = (rank - distance) % num_ranks
        target = (rank + distance) % num_ranks
        _pass_on(group, outgoing[:1], arriving[:1], source, target)  # connects, and all begin
        began = time.perf_counter()
        _pass_on(group, outgoing, arriving, source, target)
        speeds.append((source, MESSAGE_BYTES / (time.perf_counter() - began)))
        distance *= 2
    return speeds


def _pass_on(
    group: ProcessGroup, outgoing: torch.Tensor, arriving: torch.Tensor, source: int, target: int
) -> None:
    device = outgoing.device
    with exchanged_together(group, device):
        works = [group.recv([arriving], source, 0), group.send([outgoing], target, 0)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        for work in works:
            wait_for(work)
