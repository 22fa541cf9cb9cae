"""The ranks of a `tp` group as threads of one process, for a trial with values before a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

TIMEOUT_S = 60.0
"""After it a rank gives up waiting for others, which may call fewer collectives."""

T = TypeVar("T")


class VirtualRank:
    """One rank of a group of threads; see `TensorRanks`."""

    def __init__(self, rank: int, slots: list[Tensor], barrier: threading.Barrier) -> None:
        """All ranks share the `slots`, one for each, and the barrier."""
        self._rank, self._slots, self._barrier = rank, slots, barrier

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._slots)

    @torch.no_grad()
    def all_reduce(self, total: Tensor) -> None:
        total.copy_(self.all_gather(total).sum(0))

    @torch.no_grad()
    def all_gather(self, part: Tensor) -> Tensor:
        self._slots[self._rank] = part
        self._barrier.wait(TIMEOUT_S)
        parts = torch.stack(self._slots)
        self._barrier.wait(TIMEOUT_S)
        return parts


def run_on_ranks(calls: Sequence[Callable[[VirtualRank], T]]) -> list[T]:
    """The results of one call for each rank, run at once. Raises the error of the first that
    fails by itself."""
    size = len(calls)
    slots, barrier = [torch.empty(0)] * size, threading.Barrier(size)

    def run(rank: int) -> T:
        try:
            return calls[rank](VirtualRank(rank, slots, barrier))
        except BaseException:
            barrier.abort()  # the others do not wait for this rank
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(partial(run, rank)) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (own or errors)[0]
    return [future.result() for future in futures]
