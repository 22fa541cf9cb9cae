"""All-gather and reduce-scatter of hidden states over the sequence, for sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from actors.distributed.flat_collectives import all_gather, reduce_scatter
from elastic.geometry.regions import chunk_interval

DIM = 1
"""Hidden states are (batch, length, dim)."""


@dataclass(frozen=True)
class SequenceShards:
    """A sequence of `length` tokens in contiguous shards over a group, cut as `torch.chunk` does.

    It uses plain collectives on plain tensors: a DTensor would cost more on the host than the
    collective.
    """

    group: ProcessGroup
    length: int

    def gather(self, part: Tensor) -> Tensor:
        """Gather this rank's shard (batch, local length, dim) to the full sequence; the backward
        is a reduce-scatter."""
        gathered: Tensor = _Gather.apply(part, self)
        return gathered

    def scatter(self, summand: Tensor) -> Tensor:
        """Reduce-scatter a summand (batch, length, dim) to this rank's shard of the sum; the
        backward is an all-gather."""
        scattered: Tensor = _Scatter.apply(summand, self)
        return scattered

    def all_gather(self, part: Tensor) -> Tensor:
        num_ranks, longest = self.group.size(), self._longest
        padded = _padded(part, longest).contiguous()
        parts = padded.new_empty((num_ranks, *padded.shape))
        all_gather(parts.flatten(0, 1), padded, group=self.group)
        return parts.transpose(0, 1).flatten(1, 2)[:, : self.length]

    def reduce_scatter(self, summand: Tensor) -> Tensor:
        num_ranks, longest = self.group.size(), self._longest
        padded = _padded(summand, num_ranks * longest)
        parts = torch.unflatten(padded, DIM, (num_ranks, longest)).transpose(0, 1).contiguous()
        total = parts.new_empty(parts.shape[1:])
        reduce_scatter(total, parts.flatten(0, 1), group=self.group)
        own = chunk_interval(self.length, num_ranks, self.group.rank())[1]
        return total[:, :own]

    @property
    def _longest(self) -> int:
        return -(-self.length // self.group.size())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, parts: SequenceShards) -> Tensor:
        ctx.parts = parts
        return parts.all_gather(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parts.reduce_scatter(gradient), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, parts: SequenceShards) -> Tensor:
        ctx.parts = parts
        return parts.reduce_scatter(summand)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parts.all_gather(gradient), None


def _padded(hidden: Tensor, length: int) -> Tensor:
    missing = length - hidden.shape[DIM]
    return functional.pad(hidden, (0, 0, 0, missing)) if missing else hidden
