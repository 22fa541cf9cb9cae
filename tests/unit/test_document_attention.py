"""Each kernel for packed documents equals attention with a dense mask, also in gradients."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from pipelines.training.attention.document_attention import (
    PIECE,
    WIDE_PIECE,
    DocumentAttention,
    attend_by_flex,
    attend_by_pieces,
    attend_by_varlen,
    choose_kernel,
)
from pipelines.training.attention.packed_documents import (
    BLOCK,
    PackedDocuments,
    groups,
    mask_function,
)

CPU = torch.device("cpu")
HEAD_DIM = 4
SHORT, LONG = 7, 2 * PIECE + 37
ENDS = st.sets(st.integers(1, LONG - 1), max_size=12)


class Layout(NamedTuple):
    """The last positions, exclusive, of all documents but the last in each sample."""

    name: str
    length: int
    ends: tuple[tuple[int, ...], ...]

    def documents(self) -> Tensor:
        begins = torch.zeros(len(self.ends), self.length, dtype=torch.int32)
        for row, ends in zip(begins, self.ends, strict=True):
            row[list(ends)] = 1
        return begins.cumsum(1, dtype=torch.int32)


LAYOUTS = (
    Layout("short", SHORT, ((3,), (1, 2))),
    Layout("single tokens", SHORT, (tuple(range(1, SHORT)), ())),
    Layout("one document beside several", LONG, ((), (100, 200))),
    Layout("last token alone", LONG, ((LONG - 1,), (1, LONG - 1))),
    Layout("ends of blocks", 3 * BLOCK, ((BLOCK, 2 * BLOCK), (BLOCK - 1, 2 * BLOCK + 1))),
    Layout("many", LONG, (tuple(range(5, LONG, 7)), tuple(range(3, LONG, 50)))),
)


def draw_heads(length: int, dtype: torch.dtype, num_kv_heads: int = 2) -> list[Tensor]:
    """Query, key, value (batch 2, heads, length, head_dim), strided as in the model."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, length, heads, HEAD_DIM) for heads in (4, num_kv_heads, num_kv_heads)]
    drawn = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [heads.transpose(1, 2).requires_grad_() for heads in drawn]


def dense_mask(documents: Tensor) -> Tensor:
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool).tril()


def dense_attention(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Without torch's attention kernels."""
    each = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(each, dim=1) for heads in (key, value))
    scores = query @ key.mT / HEAD_DIM**0.5
    return scores.masked_fill(~dense_mask(documents), -torch.inf).softmax(-1) @ value


def varlen_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch documents of `varlen_attn` for these arguments: causal attention by segments."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k) and int(cu_seq_q[-1]) == len(query) == len(key)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert window_size == (-1, 0) and enable_gqa == (query.shape[1] != key.shape[1])
    outputs = []
    for begin, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        heads = [tokens[begin:end].transpose(0, 1)[None] for tokens in (query, key, value)]
        single = torch.zeros(1, end - begin, dtype=torch.int32)
        outputs.append(dense_attention(*heads, single)[0].transpose(0, 1))
    return torch.cat(outputs)


def compare(attend, heads: list[Tensor], documents: Tensor, tolerance: float) -> None:
    """Compare the output and gradients to those of a dense mask in float64."""
    exact = [tensor.detach().double().requires_grad_() for tensor in heads]
    expected = dense_attention(*exact, documents)
    output = attend(*heads)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    gradient = gradient.to(output.dtype)
    grads = torch.autograd.grad(output, heads, gradient)
    expected_grads = torch.autograd.grad(expected, exact, gradient.double())
    assert output.dtype == heads[0].dtype
    for tensor, reference in zip((output, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(tensor.double(), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_pieces_and_varlen_equal_a_dense_mask(layout: Layout, num_kv_heads: int) -> None:
    documents = layout.documents()
    heads = draw_heads(layout.length, torch.float64, num_kv_heads)
    packed = PackedDocuments(documents, CPU)
    compare(lambda *heads: attend_by_pieces(*heads, packed), heads, documents, 1e-12)
    compare(lambda *heads: attend_by_varlen(*heads, packed, varlen_on_cpu), heads, documents, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_pieces_of_other_dtypes_equal_a_dense_mask(layout: Layout, dtype, tolerance) -> None:
    documents = layout.documents()
    attend = DocumentAttention(documents, CPU)
    compare(attend, draw_heads(layout.length, dtype), documents, tolerance)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_flex_attention_equals_a_dense_mask(layout: Layout, num_kv_heads: int) -> None:
    """Only forward: torch has no gradients of FlexAttention on the CPU."""
    documents = layout.documents()
    heads = [head.detach() for head in draw_heads(layout.length, torch.float64, num_kv_heads)]
    output = attend_by_flex(*heads, PackedDocuments(documents, CPU), flex_attention)
    torch.testing.assert_close(output, dense_attention(*heads, documents), rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(2, LONG), ends=st.tuples(ENDS, ENDS))
def test_all_forms_of_drawn_documents_equal_the_dense_mask(length, ends) -> None:
    layout = Layout("", length, tuple(tuple(end for end in each if end < length) for each in ends))
    documents = layout.documents()
    packed, mask = PackedDocuments(documents, CPU), dense_mask(documents)
    assert torch.equal(packed.mask, mask)
    assert [sum(lengths) for lengths in packed.num_tokens] == [length] * 2
    for pieces, of_row in zip(packed.pieces(PIECE), mask[:, 0], strict=True):
        assert all(piece.num_tokens <= PIECE for piece in pieces if piece.mask is not None)
        each = [
            torch.ones(piece.num_tokens, piece.num_tokens, dtype=torch.bool).tril()
            if piece.mask is None
            else piece.mask
            for piece in pieces
        ]
        assert torch.equal(torch.block_diag(*each).bool(), of_row)
    function = mask_function(packed.first)
    expected = create_block_mask(function, 2, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)
    actual = packed.block_mask.as_tuple()
    for part, expected_part in zip(actual, expected.as_tuple(), strict=True):
        if isinstance(part, Tensor):
            assert torch.equal(part, expected_part)
    assert packed.block_mask.shape[-2:] == expected.shape[-2:] == (length, length)


def test_cumulative_lengths_cross_the_samples() -> None:
    packed = PackedDocuments(torch.tensor([[3, 3, 3, 5, 5], [5, 9, 9, 9, 9]]), CPU)
    assert packed.cumulative.tolist() == [0, 3, 5, 6, 10]
    assert packed.cumulative.dtype == torch.int32
    assert (packed.longest, packed.num_tokens) == (4, [[3, 2], [1, 4]])


def test_documents_are_joined_up_to_the_longest_piece() -> None:
    assert groups([3, 4, 1, 9, 2, 6, 1], 8) == [[3, 4, 1], [9], [2, 6], [1]]


def test_documents_that_are_not_consecutive_are_refused() -> None:
    with pytest.raises(ValueError, match="must be consecutive"):
        DocumentAttention(torch.tensor([[0, 0, 0], [1, 2, 1]]), CPU)


def test_single_documents_are_plain_causal_attention() -> None:
    heads = draw_heads(SHORT, torch.float64)
    plain = DocumentAttention(None, CPU)(*heads)
    single = DocumentAttention(torch.tensor([[4] * SHORT, [7] * SHORT]), CPU)(*heads)
    assert torch.equal(plain, single)


def test_no_large_mask_is_built_for_long_samples() -> None:
    layout = LAYOUTS[-1]
    for dtype, longest in ((torch.float32, PIECE), (torch.bfloat16, WIDE_PIECE)):
        packed = PackedDocuments(layout.documents(), CPU)
        attend_by_pieces(*draw_heads(layout.length, dtype), packed)
        masks = [piece.mask for pieces in packed.pieces(longest) for piece in pieces]
        assert max(mask.numel() for mask in masks if mask is not None) <= longest**2
        assert "mask" not in vars(packed)


def test_documents_do_not_recompile_a_checkpointed_block() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def block(query: Tensor, key: Tensor, value: Tensor, attend: DocumentAttention) -> Tensor:
        return attend(query * 2, key, value) + 1

    heads = draw_heads(LONG, torch.float64)
    num_graphs = []
    for layout in LAYOUTS[2:4] + LAYOUTS[5:]:
        documents = layout.documents()
        attend = DocumentAttention(documents, CPU)
        output = checkpoint(block, *heads, attend, use_reentrant=False)
        plain = dense_attention(heads[0] * 2, *heads[1:], documents) + 1
        for actual, expected in zip(
            torch.autograd.grad(output.sin().sum(), heads),
            torch.autograd.grad(plain.sin().sum(), heads),
            strict=True,
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        num_graphs.append(len(graphs))
    assert num_graphs == num_graphs[:1] * 3


def test_the_cpu_attends_by_pieces() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert choose_kernel(*draw_heads(SHORT, dtype)) is attend_by_pieces
