"""The exchange of tokens between the ranks that share the experts of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from actors.distributed.backends.waiting import launching


class Routing:
    """The numbers of rows that this rank sends to each expert and receives for its own.

    With `ep` the host needs them for the all-to-all. They are copied once for each forward of a
    layer: the routing of a layer depends on the output of the one before. The copy starts here, and
    the host waits for it only in `read`.
    """

    def __init__(self, counts: Tensor, group: ProcessGroup | None) -> None:
        self.counts = counts
        self.group = group
        self.received = counts
        self._num_ranks = num_ranks(group)
        if self._num_ranks == 1:
            return
        self.received = torch.empty_like(counts)
        launching(dist.all_to_all_single, self.received, counts, group=group)
        both = torch.stack((counts, self.received)).view(2, self._num_ranks, -1)
        self._on_host = both.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if counts.device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> tuple[list[list[int]], list[list[int]]]:
        """The numbers sent and received, each by rank, then by the rank's expert."""
        if self._copied is not None:
            self._copied.synchronize()
        sent, received = self._on_host.tolist()
        return sent, received


def send_through_experts(
    rows: Tensor,
    routing: Routing,
    compute: Callable[[Tensor, Tensor, list[int]], Tensor],
) -> Tensor:
    """Send rows, sorted by expert, to the ranks of their experts and back.

    `compute` gets the rows that arrive for this rank's experts, sorted by expert, and their numbers
    by expert on the device and on the host. All ranks of the group must call forward and backward
    together, even a rank without rows.
    """
    group = routing.group
    assert group is not None, "one rank has all experts"
    sent, received = routing.read()
    to_each, from_each = [sum(part) for part in sent], [sum(part) for part in received]
    arrived = _TokenExchange.apply(rows, to_each, from_each, group)
    counts = routing.received.view(len(received), -1)
    experts = torch.arange(counts.shape[1], device=rows.device).repeat(len(received))
    expert_of_row = experts.repeat_interleave(routing.received, output_size=len(arrived))
    order = expert_of_row.argsort(stable=True)
    back = order.argsort()
    num_rows = [sum(part) for part in zip(*received, strict=True)]
    done = compute(Permute.apply(arrived, order, back), counts.sum(0), num_rows)
    returned: Tensor = _TokenExchange.apply(
        Permute.apply(done, back, order), from_each, to_each, group
    )
    return returned


def send_to_experts_of(
    tokens: Tensor, chosen: Tensor, compute: Callable[[Tensor], Tensor]
) -> Tensor:
    """The output of each chosen expert (tokens, k) for its token: (tokens, k, dim).

    `compute` gets a copy of the token for each choice, sorted by expert.
    """
    order = chosen.flatten().argsort(stable=True)
    back = order.argsort()
    copies = tokens[:, None].expand(-1, chosen.shape[1], -1).flatten(0, 1)
    done = compute(Permute.apply(copies, order, back))
    return torch.unflatten(Permute.apply(done, back, order), 0, chosen.shape)


class Permute(torch.autograd.Function):
    """Rows in another order, whose inverse is `back`. The backward of plain indexing would add
    gradients in an undefined order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        [back] = ctx.saved_tensors
        return gradient[back], None, None


class _TokenExchange(torch.autograd.Function):
    """All-to-all of rows in rank order; the backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, to_each: list[int], from_each: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.route = (from_each, to_each, group)
        return _exchanged(rows, to_each, from_each, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, *ctx.route), None, None, None


def _exchanged(
    rows: Tensor, to_each: list[int], from_each: list[int], group: ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(from_each), *rows.shape[1:])
    rows = rows.contiguous()
    launching(dist.all_to_all_single, received, rows, from_each, to_each, group=group)
    return received


def count_choices(chosen: Tensor, num_experts: int) -> Tensor:
    """The number of choices of each expert. `bincount` would make the host wait for a GPU."""
    ones = torch.ones_like(chosen).flatten()
    return ones.new_zeros(num_experts).scatter_add_(0, chosen.flatten(), ones)


def num_ranks(group: ProcessGroup | None) -> int:
    return group.size() if group else 1
