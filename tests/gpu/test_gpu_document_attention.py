"""The GPU's kernels for packed documents equal attention with a dense mask, also in gradients."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from one_gpu import NEEDS_GPU
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from pipelines.training.attention.document_attention import (
    DocumentAttention,
    attend_by_flex,
    attend_by_pieces,
    attend_by_varlen,
    choose_kernel,
)
from pipelines.training.attention.packed_documents import BLOCK, PackedDocuments

pytestmark = NEEDS_GPU

HEAD_DIM = 64
LENGTHS = (7, 3 * BLOCK, 3 * BLOCK + 37)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-3, torch.bfloat16: 5e-2}
"""FlexAttention's float32 products may be rounded to TF32."""


def draw_documents(length: int) -> Tensor:
    """One document in the first sample, several in the second and single tokens in the third."""
    begins = torch.zeros(3, length, dtype=torch.int32)
    begins[1, [length // 3, length // 2, length - 1]] = 1
    begins[2] = 1
    return begins.cumsum(1, dtype=torch.int32)


def draw_heads(length: int, dtype: torch.dtype, num_kv_heads: int) -> list[Tensor]:
    shapes = [(3, length, heads, HEAD_DIM) for heads in (4, num_kv_heads, num_kv_heads)]
    drawn = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    return [heads.transpose(1, 2).requires_grad_() for heads in drawn]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Without torch's attention kernels."""
    each = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(each, dim=1) for heads in (key, value))
    documents = documents.to(query.device)
    hidden = documents[:, None, :, None] != documents[:, None, None, :]
    hidden = hidden | torch.ones_like(hidden).triu(1)
    scores = query @ key.mT / HEAD_DIM**0.5
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_chosen_kernel_equals_a_dense_mask(length, dtype, num_kv_heads) -> None:
    torch.manual_seed(length)
    documents, heads = draw_documents(length), draw_heads(length, dtype, num_kv_heads)
    exact = [tensor.detach().double().requires_grad_() for tensor in heads]
    expected = dense_attention(*exact, documents)
    output = DocumentAttention(documents, torch.device("cuda"))(*heads)
    gradient = torch.randn_like(output)
    grads = torch.autograd.grad(output, heads, gradient)
    expected_grads = torch.autograd.grad(expected, exact, gradient.double())
    tolerance = TOLERANCES[dtype]
    for tensor, reference in zip((output, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(tensor.double(), reference, rtol=tolerance, atol=tolerance)


HAS_VARLEN = "enable_gqa" in signature(varlen_attn).parameters
"""From torch 2.12 on."""


def test_the_kernel_is_chosen_by_dtype() -> None:
    """With Triton, and a GPU of compute capability 8.0 or higher."""
    chosen = {dtype: choose_kernel(*draw_heads(8, dtype, 2)) for dtype in TOLERANCES}
    assert chosen == {
        torch.float64: attend_by_pieces,
        torch.float32: attend_by_flex,
        torch.bfloat16: attend_by_varlen if HAS_VARLEN else attend_by_flex,
    }


def test_long_samples_are_attended_to_without_a_mask_of_all_scores() -> None:
    """Two masks of all scores would take 8 GiB: 65,536 queries times as many keys."""
    length = 2**16
    documents = torch.arange(length).div(1000, rounding_mode="floor")[None]
    device = torch.device("cuda")
    kernels = [(attend_by_flex, torch.bfloat16), (attend_by_flex, torch.float32)]
    if HAS_VARLEN:
        kernels.append((attend_by_varlen, torch.bfloat16))
    for kernel, dtype in kernels:
        heads = [torch.randn(1, 2, length, HEAD_DIM, device=device, dtype=dtype) for _ in range(3)]
        torch.cuda.reset_peak_memory_stats()
        kernel(*heads, PackedDocuments(documents, device))
        assert torch.cuda.max_memory_allocated() < 2**30
