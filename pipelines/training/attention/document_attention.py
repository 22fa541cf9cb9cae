"""Causal attention within the documents of packed samples, by the fastest kernel there is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from pipelines.training.attention.flash_attention import has_flash_kernel
from pipelines.training.attention.packed_documents import DocumentPiece, PackedDocuments

PIECE = 128
"""Documents of a sample are attended to together up to this number of tokens: fewer calls, but
more masked scores. Measured on the CPU (docs/facts.md)."""
WIDE_PIECE = 256
"""The same in 16 bits, where each call on the CPU is slower."""
GPU_PIECE = 1024
MIN_FLEX_DIM = 16
"""FlexAttention's kernels refuse smaller heads."""
NUM_FLEX_SHAPES = 64

Kernel = Callable[[Tensor, Tensor, Tensor, PackedDocuments], Tensor]


class DocumentAttention:
    """Causal attention of one pass, within documents if a sample has several.

    `documents` (batch, length), int, on the host, numbers the document of each token; None means
    one document in each sample. Raises `ValueError` if a document's tokens are not consecutive.
    """

    def __init__(self, documents: Tensor | None, device: torch.device) -> None:
        self._packed: PackedDocuments | None = None
        # Plain causal attention is equivalent for single documents, and faster.
        if documents is not None and not bool((documents == documents[:, :1]).all()):
            self._packed = PackedDocuments(documents, device)
            self._attend = _without_compiler()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attended values, as `query`: (batch, heads, length, head_dim).

        `key` and `value` have as many heads, or fewer with one for each group of query heads.
        """
        if self._packed is None:
            return attend_causally(query, key, value)
        attended: Tensor = self._attend(query, key, value, self._packed)
        return attended


@cache
def _without_compiler() -> Callable[..., Any]:
    """`attend_packed`, which a compiled block calls as it is.

    The lengths of documents change at each pass and would cause recompilation. As a decorator this
    would import the compiler in every command, which takes 1 s.
    """
    uncompiled: Callable[..., Any] = torch.compiler.disable(attend_packed)
    return uncompiled


def attend_packed(query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments) -> Tensor:
    """Causal attention within documents, by the kernel that suits the device and the dtype."""
    return choose_kernel(query, key, value)(query, key, value, documents)


def choose_kernel(query: Tensor, key: Tensor, value: Tensor) -> Kernel:
    """The only place that chooses, by device, dtype, head size and the version of torch.

    On a GPU: varlen attention in 16 bits, FlexAttention where the former is missing. On the CPU,
    or without either: attention by pieces.
    """
    if has_flash_kernel(query, key, value) and _find_varlen() is not None:
        return attend_by_varlen
    has_flex_kernel = query.is_cuda and query.dtype != torch.float64 and _has_triton()
    if has_flex_kernel and query.shape[-1] >= MIN_FLEX_DIM:
        return attend_by_flex
    return attend_by_pieces


@cache
def _find_varlen() -> Callable[..., Tensor] | None:
    """Torch's varlen attention if it supports grouped heads, which it does from 2.12 on.

    Importing it imports the compiler.
    """
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    attend: Callable[..., Tensor] = import_module("torch.nn.attention.varlen").varlen_attn
    return attend if "enable_gqa" in signature(attend).parameters else None


@cache
def _has_triton() -> bool:
    """Whether FlexAttention can be compiled; uncompiled, it computes all scores."""
    return find_spec("triton") is not None


@cache
def _compiled_flex() -> Callable[..., Any]:
    """For many shapes and dtypes: beyond the limit, torch would call FlexAttention uncompiled,
    which computes all scores."""
    config: Any = import_module("torch.compiler.config")
    config.recompile_limit = max(config.recompile_limit, NUM_FLEX_SHAPES)
    return torch.compile(flex_attention)


def attend_by_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments,
    varlen: Callable[..., Tensor] | None = None,
) -> Tensor:
    """One flash kernel over all documents of the batch; `varlen` is torch's by default."""
    varlen = _find_varlen() if varlen is None else varlen
    assert varlen is not None
    tokens = [heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value)]
    attended = varlen(
        *tokens,
        documents.cumulative,
        documents.cumulative,
        documents.longest,
        documents.longest,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[1] != key.shape[1],
    )
    by_sample = torch.unflatten(attended, 0, (documents.batch, documents.length))
    return by_sample.transpose(1, 2)


def attend_by_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments,
    flex: Callable[..., Any] | None = None,
) -> Tensor:
    """FlexAttention, which skips blocks without a visible key; `flex` is compiled by default."""
    flex = _compiled_flex() if flex is None else flex
    attended: Tensor = flex(
        query,
        key,
        value,
        block_mask=documents.block_mask,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended


def attend_by_pieces(
    query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments
) -> Tensor:
    """Attention by a few whole documents at a time; all at once if samples are short.

    No mask is larger than a piece of several documents.
    """
    longest = piece_length(query)
    if documents.length <= longest:
        return _attend(query, key, value, documents.mask)
    samples = zip(query, key, value, documents.pieces(longest), strict=True)
    return torch.stack([_attend_to_pieces(*sample) for sample in samples])


def piece_length(query: Tensor) -> int:
    if query.is_cuda:
        return GPU_PIECE
    return WIDE_PIECE if query.dtype.itemsize == 2 else PIECE


def _attend_to_pieces(
    query: Tensor, key: Tensor, value: Tensor, pieces: list[DocumentPiece]
) -> Tensor:
    """The attention of one sample (heads, length, head_dim)."""
    lengths = [piece.num_tokens for piece in pieces]
    # Unlike slices, a split needs no gradient of the full size for each piece.
    queries, keys, values = (heads[None].split(lengths, dim=2) for heads in (query, key, value))
    masks = [piece.mask for piece in pieces]
    attended = [_attend(*part) for part in zip(queries, keys, values, masks, strict=True)]
    return torch.cat(attended, dim=2)[0]


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each token attends to itself and to earlier tokens."""
    return _attend(query, key, value, None)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
