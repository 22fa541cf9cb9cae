"""Expert parallelism of third-party modules: `ep` deals the experts of a layer to ranks.

A module of experts is called with tokens (any, dim), the experts that each of them has chosen
(any, k), and their weights (any, k), as in `transformers`; it returns (any, dim). Dim 0 of each of
its parameters is the number of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from elastic.geometry.regions import chunk_interval
from pipelines.training.models.token_exchange import (
    Routing,
    count_choices,
    send_through_experts,
    send_to_experts_of,
)
from pipelines.training.tensor.unsharded_hidden import GroupRanks
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.workload import ModelShape

ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]


def named_experts(module: nn.Module, shape: ModelShape) -> Iterator[tuple[str, nn.Module]]:
    """The modules of experts in a module, by name."""
    return ((name, part) for name, part in module.named_modules() if shape.are_experts(name))


def number_of(experts: nn.Module) -> int:
    """The number of experts of a module, or 0 if its parameters or buffers do not fit."""
    sizes = {parameter.shape[:1] for parameter in experts.parameters()}
    has_others = any(True for _ in experts.buffers()) or len(sizes) != 1 or torch.Size() in sizes
    return 0 if has_others else sizes.pop()[0]


def distribute_experts(module: nn.Module, shape: ModelShape, parallel: ParallelGroups) -> None:
    """Let each rank have and compute its part of the experts of a module on the meta device.

    Under `tp`, whose ranks all have the same tokens, each rank sends its part of them.
    """
    if parallel.num_ep == 1 and parallel.tp is None:
        return
    for _, experts in named_experts(module, shape):
        forward: ExpertsForward = experts.forward
        num_experts = number_of(experts)
        if parallel.num_ep > 1:
            keep_part(experts, 0, parallel.num_ep)
            forward = partial(_exchanged, forward, num_experts, parallel)
        if parallel.tp is not None:
            forward = partial(_divided, forward, GroupRanks(parallel.tp.get_group()))
        # The numbers of tokens change at each call and would cause recompilation.
        experts.forward = torch.compiler.disable(forward)


def keep_part(experts: nn.Module, part: int, num_parts: int) -> None:
    """Keep one of equal parts of the experts of a module."""
    size = number_of(experts) // num_parts
    for inner in experts.modules():
        for key, parameter in list(inner.named_parameters(recurse=False)):
            kept = parameter.detach()[part * size : (part + 1) * size]
            setattr(inner, key, nn.Parameter(kept, parameter.requires_grad))
    if hasattr(experts, "num_experts"):
        vars(experts)["num_experts"] = size


def compute_rows(forward: ExpertsForward, rows: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    """The outputs of rows that are sorted by expert, with `counts` rows for each."""
    numbers = torch.arange(len(counts), device=rows.device)
    experts = numbers.repeat_interleave(counts, output_size=num_rows)[:, None]
    return _with_a_row(forward, rows, experts, torch.ones_like(experts, dtype=rows.dtype))


def _exchanged(
    forward: ExpertsForward,
    num_experts: int,
    parallel: ParallelGroups,
    tokens: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    routing = Routing(count_choices(chosen, num_experts), parallel.ep)

    def compute(rows: Tensor, counts: Tensor, num_rows: list[int]) -> Tensor:
        return compute_rows(forward, rows, counts, sum(num_rows))

    outputs = send_to_experts_of(
        tokens, chosen, lambda rows: send_through_experts(rows, routing, compute)
    )
    return (outputs * weights[..., None]).sum(1).to(tokens.dtype)


def _divided(
    forward: ExpertsForward, ranks: GroupRanks, tokens: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Each rank computes its part of the tokens, which all ranks have."""
    own = [_SplitTokens.apply(part, ranks) for part in (tokens, chosen, weights)]
    outputs: Tensor = _GatherTokens.apply(_with_a_row(forward, *own), len(tokens), ranks)
    return outputs


def _with_a_row(forward: ExpertsForward, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Call the experts; without tokens with a row of zeros, since all ranks of a group need
    gradients of the same parameters."""
    if len(tokens):
        return forward(tokens, chosen, weights)
    parts = (tokens, chosen, weights)
    tokens, chosen, weights = (torch.cat((x, x.new_zeros(1, x.shape[1]))) for x in parts)
    return forward(tokens, chosen, weights)[:0]


class _SplitTokens(torch.autograd.Function):
    """This rank's part of the tokens (any, dim) in forward, all-gather of the gradient in backward.

    All results are contiguous: sums of float32 in another order round otherwise.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ranks: GroupRanks) -> Tensor:
        ctx.ranks, ctx.num_tokens = ranks, len(tokens)
        return _own_tokens(tokens, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_tokens(gradient, ctx.num_tokens, ctx.ranks), None


class _GatherTokens(torch.autograd.Function):
    """All-gather of the tokens in forward, this rank's part of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, num_tokens: int, ranks: GroupRanks) -> Tensor:
        ctx.ranks = ranks
        return _all_tokens(part, num_tokens, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_tokens(gradient, ctx.ranks), None, None


def _own_tokens(tokens: Tensor, ranks: GroupRanks) -> Tensor:
    first, size = chunk_interval(len(tokens), ranks.size(), ranks.rank())
    return tokens[first : first + size].clone(memory_format=torch.contiguous_format)


def _all_tokens(part: Tensor, num_tokens: int, ranks: GroupRanks) -> Tensor:
    longest = -(-num_tokens // ranks.size())
    padded = functional.pad(part, (0, 0, 0, longest - len(part))).contiguous()
    return ranks.all_gather(padded).flatten(0, 1)[:num_tokens]
