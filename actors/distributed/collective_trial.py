"""Collective trial: the seconds of each kind of collective, by its bytes, in a machine's groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from actors.distributed.backends.torch_groups_private import PeerMessage, exchange_all
from actors.distributed.flat_collectives import all_gather, reduce_scatter
from actors.distributed.stall import wait_for
from elastic.geometry.training_job import CollectiveTimes

SIZES = (2**10, 2**14, 2**17, 2**20, 2**22, 2**24)
"""Bytes of the whole tensor."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "shift")
NUM_TRIES = 7
CALL_BYTES = 2**17
"""Collectives below this size are timed several at once."""
MAX_CALLS = 16
OVERLAPPED_BYTES = 2**22
WIDTH = 256
NUM_PRODUCTS = 40
"""Products of this width take some times as long as a collective of `OVERLAPPED_BYTES`."""

Start = Callable[[], list[Work]]


def collective_times(group: ProcessGroup, device: torch.device) -> tuple[CollectiveTimes, ...]:
    """The tables of a group, equal on all its ranks; every rank calls this at the same time."""
    tables = []
    for kind in KINDS:
        points = [(float(size), _seconds(group, device, kind, size)) for size in SIZES]
        rising = [max(seconds for _, seconds in points[: i + 1]) for i in range(len(points))]
        sizes = [size for size, _ in points]
        tables.append(CollectiveTimes(kind, group.size(), tuple(zip(sizes, rising, strict=True))))
    return tuple(tables)


def interference(group: ProcessGroup, device: torch.device) -> float:
    """The share of the shorter of compute and an all-reduce that side by side is not hidden."""
    factor = torch.ones(WIDTH, WIDTH, device=device)
    start = _start(group, device, "all_reduce", OVERLAPPED_BYTES)

    def compute() -> None:
        for _ in range(NUM_PRODUCTS):
            torch.mm(factor, factor)

    def both() -> None:
        works = start()
        compute()
        _wait(works)

    compute_s = _median(group, device, compute)
    alone_s = _median(group, device, lambda: _wait(start()))
    hidden_s = compute_s + alone_s - _median(group, device, both)
    return min(1.0, max(0.0, 1 - hidden_s / min(compute_s, alone_s)))


def _seconds(group: ProcessGroup, device: torch.device, kind: str, size: int) -> float:
    num_calls = max(1, min(MAX_CALLS, CALL_BYTES // size))
    start = _start(group, device, kind, size)
    _wait(start())  # connects

    def calls() -> None:
        for _ in range(num_calls):
            _wait(start())

    return _median(group, device, calls) / num_calls


def _median(group: ProcessGroup, device: torch.device, run: Callable[[], None]) -> float:
    """The median seconds over tries, and over the ranks the largest: a group waits for all."""
    times_s = []
    for _ in range(NUM_TRIES):
        wait_for(group.allreduce([torch.zeros(1, device=device)]))
        _synchronize(device)
        began = time.perf_counter()
        run()
        _synchronize(device)
        times_s.append(time.perf_counter() - began)
    slowest = torch.tensor([median(times_s)], device=device)
    wait_for(group.allreduce([slowest], dist.ReduceOp.MAX))
    return float(slowest)


def _start(group: ProcessGroup, device: torch.device, kind: str, size: int) -> Start:
    """A function that starts one collective of a tensor of about these bytes."""
    num_ranks, rank = group.size(), group.rank()
    part = torch.zeros(-(-size // 4 // num_ranks), device=device)
    whole = torch.zeros(len(part) * num_ranks, device=device)
    if kind == "all_reduce":
        return lambda: _works(dist.all_reduce(whole, group=group, async_op=True))
    if kind == "all_gather":
        return lambda: _works(all_gather(whole, part, group=group, async_op=True))
    if kind == "reduce_scatter":
        return lambda: _works(reduce_scatter(part, whole, group=group, async_op=True))
    arriving = torch.empty_like(whole)
    receives = [PeerMessage(arriving, (rank - 1) % num_ranks, 0)]
    sends = [PeerMessage(whole, (rank + 1) % num_ranks, 0)]
    return lambda: list(exchange_all(group, device, receives, sends))


def _works(work: Work | None) -> list[Work]:
    assert work is not None
    return [work]


def _wait(works: list[Work]) -> None:
    for work in works:
        wait_for(work)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
