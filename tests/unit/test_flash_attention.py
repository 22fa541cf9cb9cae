"""The library's flash kernel by blocks of keys equals attention to all keys, also in gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actors.distributed.torch_private import flash_attention, flash_attention_backward
from pipelines.training.attention.flash_attention import MergedBlocks

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
LENGTH = 11
HEAD_DIM = 6


def draw_heads(num_heads: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2, LENGTH, num_heads, HEAD_DIM).to(dtype).transpose(1, 2)


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention and its log-sum-exp, without the library's kernels."""
    each = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(each, dim=1) for heads in (key, value))
    scores = query @ key.mT / HEAD_DIM**0.5
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def blocks(first: int) -> list[tuple[slice, slice, bool]]:
    """Queries and keys of the three blocks into which a causal mask is cut at `first`."""
    early, late = slice(0, first), slice(first, LENGTH)
    return [(late, early, False), (early, early, True), (late, late, True)]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("first", [1, 4, LENGTH - 1])
def test_merged_blocks_equal_attention_to_all_keys(first, dtype, num_kv_heads) -> None:
    torch.manual_seed(first)
    heads = [draw_heads(number, dtype) for number in (4, num_kv_heads, num_kv_heads)]
    exact = [tensor.double().requires_grad_() for tensor in heads]
    expected, expected_log_sum_exp = plain_attention(*exact)
    gradient = draw_heads(4, dtype)
    expected_grads = torch.autograd.grad(expected, exact, gradient.double())

    query, key, value = heads
    merged = MergedBlocks(query)
    for rows, columns, is_causal in blocks(first):
        keys, values = key[:, :, columns], value[:, :, columns]
        merged.add(rows, *flash_attention(query[:, :, rows], keys, values, is_causal))
    output, log_sum_exp = merged.result()
    grads = [torch.zeros_like(tensor, dtype=output.dtype) for tensor in heads]
    for rows, columns, is_causal in blocks(first):
        block_grads = flash_attention_backward(
            *(tensor[:, :, rows] for tensor in (gradient, query)),
            *(tensor[:, :, columns] for tensor in (key, value)),
            *(tensor[:, :, rows] for tensor in (output.to(dtype), log_sum_exp)),
            is_causal,
        )
        for grad, block_grad, part in zip(
            grads, block_grads, (rows, columns, columns), strict=True
        ):
            grad[:, :, part] += block_grad

    assert output.dtype == log_sum_exp.dtype == torch.promote_types(dtype, torch.float32)
    actual = (output, log_sum_exp, *grads)
    for tensor, reference in zip(
        actual, (expected, expected_log_sum_exp, *expected_grads), strict=True
    ):
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(tensor.double(), reference, rtol=tolerance, atol=tolerance)


def test_gradient_of_a_sum_is_read_correctly() -> None:
    heads = draw_heads(2, torch.float64)
    output, log_sum_exp = flash_attention(heads, heads, heads, True)
    ones = torch.ones(1, dtype=torch.float64).expand(heads.shape)
    expanded, full = (
        flash_attention_backward(gradient, heads, heads, heads, output, log_sum_exp, True)
        for gradient in (ones, ones.clone(memory_format=torch.contiguous_format))
    )
    assert all(map(torch.equal, expanded, full))


def test_the_gpu_kernels_take_the_arguments() -> None:
    """On the meta device, which checks the signatures and gives the shapes of the GPU's kernels."""
    query = torch.empty(2, 4, 6, 8, device="meta", dtype=torch.bfloat16)
    key = query[:, :2]
    output, log_sum_exp = flash_attention(query, key, key, True)
    assert (output.shape, log_sum_exp.shape) == (query.shape, (2, 4, 6))
    grads = flash_attention_backward(output, query, key, key, output, log_sum_exp, True)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]
