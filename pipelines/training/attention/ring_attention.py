"""Ring attention: exact causal attention over a sequence sharded over `cp`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from actors.distributed.torch_private import flash_attention, flash_attention_backward
from pipelines.training.attention.flash_attention import MergedBlocks, has_flash_kernel
from pipelines.training.workload.ring import Hop, Ring


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    length: int,
    group: ProcessGroup,
    documents: Tensor | None = None,
) -> Tensor:
    """Causal attention over a sequence of `length`, of which a rank holds its `ring.positions`.

    `query` is (batch, heads, local length, head_dim); `key` and `value` have as many heads, or
    fewer with one for each group of query heads. `documents`, int64 (batch, length) and equal on
    all ranks, numbers the document of each token; a query attends only to its own document.
    Returns the shape and dtype of `query`; the softmax is computed in float32 or better, and so are
    the sums over blocks.

    All ranks of the group, two or more, must call it and its backward. Errors of the group
    propagate. Raises `ValueError` for a wrong shape.

    Liu et al., Ring Attention, 2023; softmax and gradients by tiles: Dao et al., FlashAttention,
    2022, algorithms 1 and 4.
    """
    separate = documents
    if documents is not None and bool((documents == documents[:, :1]).all()):
        separate = None  # one document in each sample: plain causal attention
    ring = Ring(length, group, None if separate is None else separate.to(query.device))
    held = ring.num_held(ring.cp_rank)
    if query.shape[2] != held or key.shape[2] != held or key.shape != value.shape:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        raise ValueError(f"query, key, value are {shapes}, but this rank has {held} positions")
    if documents is not None and documents.shape != (query.shape[0], length):
        raise ValueError(f"documents are {tuple(documents.shape)}, not (batch, {length})")
    by_flash = separate is None and uses_flash(query, key, value)
    inputs = (query, key, value, ring)
    attended: Tensor = (
        FlashRingAttention.apply(*inputs) if by_flash else TiledRingAttention.apply(*inputs)
    )
    return attended


def uses_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the library's flash kernel computes the blocks, instead of the tiles of this file.

    The choice need not be equal on all ranks: the messages are. On the CPU, the kernel is faster in
    float32 only (docs/facts.md).
    """
    on_cpu = query.device.type == "cpu"
    return query.dtype == torch.float32 if on_cpu else has_flash_kernel(query, key, value)


class FlashRingAttention(torch.autograd.Function):
    """Ring attention without documents by the library's kernel: one call for each rank's keys."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        merged = MergedBlocks(query)
        for source, block in ring.circulate(block_of(key, value, ring)):
            visible = ring.visible_keys(source)
            if visible is not None:
                rows, columns, is_causal = visible
                keys, values = block.unflatten(1, key.shape[:2])[:, :, :, columns]
                part = flash_attention(query[:, :, rows], keys, values, is_causal)
                merged.add(rows, *part)
        attended, log_sum_exp = merged.result()
        output = attended.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        ring: Ring = ctx.ring
        query_grad = torch.zeros_like(query, dtype=exact_dtype(query))
        hop = None
        for source, block in ring.circulate(block_of(key, value, ring)):
            block_grad = torch.zeros_like(block, dtype=exact_dtype(query))
            visible = ring.visible_keys(source)
            if visible is not None:
                rows, columns, is_causal = visible
                keys, values = block.unflatten(1, key.shape[:2])[:, :, :, columns]
                heads = (grad_output[:, :, rows], query[:, :, rows], keys, values)
                of_rows = (output[:, :, rows], log_sum_exp[:, :, rows])
                grads = flash_attention_backward(*heads, *of_rows, is_causal)
                query_grad[:, :, rows] += grads[0]
                by_sample = block_grad.unflatten(1, key.shape[:2])
                by_sample[0, :, :, columns], by_sample[1, :, :, columns] = grads[1:]
            if hop is not None:
                block_grad += hop.wait()
            hop = Hop(block_grad, ring)
        assert hop is not None
        key_grad, value_grad = hop.wait()[:, :, : key.shape[2]]
        return (
            query_grad.to(query.dtype),
            key_grad.to(key.dtype).reshape(key.shape),
            value_grad.to(value.dtype).reshape(value.shape),
            None,
        )


class TiledRingAttention(torch.autograd.Function):
    """Ring attention by tiles of scores, with or without documents, on any device.

    Queries stay; keys and values circulate, in backward followed by their gradients.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        queries = grouped(query, key.shape[1])
        softmax = OnlineSoftmax(queries)
        for source, (keys, values) in ring.circulate(block_of(key, value, ring)):
            for rows, columns, masked in ring.tiles(source, query.device):
                scores = scores_of(queries[:, :, rows], keys[:, columns], masked)
                softmax.add(rows, scores, values[:, columns])
        attended, log_sum_exp = softmax.result()
        output = attended.to(query.dtype).reshape(query.shape)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        ring: Ring = ctx.ring
        queries, grads, outputs = (
            grouped(heads, key.shape[1]) for heads in (query, grad_output, output)
        )
        exact = exact_dtype(query)
        delta = (grads.to(exact) * outputs).sum(-1, keepdim=True)
        query_grad = queries.new_zeros(queries.shape, dtype=exact)
        hop = None
        for source, block in ring.circulate(block_of(key, value, ring)):
            (keys, values), block_grad = block, torch.zeros_like(block, dtype=exact)
            for rows, columns, masked in ring.tiles(source, query.device):
                scores = scores_of(queries[:, :, rows], keys[:, columns], masked)
                weights = scores.sub_(log_sum_exp[:, :, rows]).exp_()
                score_grads = per_query(grads[:, :, rows], values[:, columns].mT)
                score_grads.sub_(delta[:, :, rows]).mul_(weights)
                query_grad[:, :, rows] += per_query(score_grads, keys[:, columns])
                block_grad[0, :, columns] += over_queries(score_grads, queries[:, :, rows])
                block_grad[1, :, columns] += over_queries(weights, grads[:, :, rows])
            if hop is not None:
                block_grad += hop.wait()
            hop = Hop(block_grad, ring)
        assert hop is not None
        key_grad, value_grad = hop.wait()[:, :, : key.shape[2]]
        return (
            (query_grad * scale(query)).to(query.dtype).reshape(query.shape),
            (key_grad * scale(query)).to(key.dtype).reshape(key.shape),
            value_grad.to(value.dtype).reshape(value.shape),
            None,
        )


class OnlineSoftmax:
    """The attention of queries (batch * kv heads, group, length, head_dim), tile by tile."""

    def __init__(self, queries: Tensor) -> None:
        exact = exact_dtype(queries)
        each = (*queries.shape[:-1], 1)
        # Not -inf: a query that is fully masked in its first tile would get NaN.
        self._maximum = queries.new_full(each, torch.finfo(exact).min, dtype=exact)
        self._total = queries.new_zeros(each, dtype=exact)
        self._weighted = queries.new_zeros(queries.shape, dtype=exact)

    def add(self, rows: slice, scores: Tensor, values: Tensor) -> None:
        """Add the scores of some queries, which it overwrites, and the values of the keys."""
        old, total, weighted = (
            tensor[:, :, rows] for tensor in (self._maximum, self._total, self._weighted)
        )
        new = torch.maximum(old, scores.amax(-1, keepdim=True))
        weights, decay = scores.sub_(new).exp_(), (old - new).exp_()
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        weighted.mul_(decay).add_(per_query(weights, values))
        old.copy_(new)

    def result(self) -> tuple[Tensor, Tensor]:
        """The attended values, and the log-sum-exp of each query."""
        return self._weighted / self._total, self._maximum + self._total.log()


def grouped(heads: Tensor, num_kv_heads: int) -> Tensor:
    """(batch, heads, length, head_dim) as (batch * kv heads, group, length, head_dim)."""
    return torch.unflatten(heads, 1, (num_kv_heads, -1)).flatten(0, 1)


def block_of(key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """The block that circulates: (2, batch * kv heads, longest local length, head_dim).

    It is padded to one size for all ranks, so that all messages have the same size and none is
    empty.
    """
    batch, num_kv_heads, held, head_dim = key.shape
    longest = max(ring.num_held(cp_rank) for cp_rank in range(ring.size))
    block = key.new_zeros(2, batch, num_kv_heads, longest, head_dim)
    block[0, :, :, :held] = key
    block[1, :, :, :held] = value
    return block.flatten(1, 2)


def scores_of(queries: Tensor, keys: Tensor, masked: Tensor | None) -> Tensor:
    """Scaled products (batch * kv heads, group, queries, keys), -inf where masked."""
    scores = per_query(queries, keys.mT).mul_(scale(queries))
    if masked is not None:
        by_sample = scores.view(len(masked), -1, *masked.shape[1:])
        by_sample.masked_fill_(masked[:, None], -math.inf)
    return scores


def scale(queries: Tensor) -> float:
    return 1 / math.sqrt(queries.shape[-1])


def per_query(left: Tensor, right: Tensor) -> Tensor:
    """(n, group, queries, k) times (n, k, m), for each query."""
    return torch.unflatten(product(left.flatten(1, 2), right), 1, left.shape[1:3])


def over_queries(left: Tensor, right: Tensor) -> Tensor:
    """(n, group, queries, k) times (n, group, queries, m), summed over the group's queries."""
    return product(left.flatten(1, 2).mT, right.flatten(1, 2))


def product(left: Tensor, right: Tensor) -> Tensor:
    """A batched matrix product in float32 or better.

    On a GPU a narrow right operand is multiplied in its own dtype and accumulated in float32.
    """
    exact = exact_dtype(right)
    if right.is_cuda and right.dtype != exact:
        return torch.bmm(left.to(right.dtype), right, out_dtype=exact)
    return torch.bmm(left.to(exact), right.to(exact))


def exact_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
