"""The documents of a batch whose samples are packed, in the forms that attention kernels take."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys of a block of FlexAttention's mask: its default, for which its kernels are
tuned."""


class DocumentPiece(NamedTuple):
    """Whole documents of one sample that are attended to together; `mask` is None for one.

    `mask` is boolean (tokens, tokens), True where a query may attend to a key.
    """

    num_tokens: int
    mask: Tensor | None


class PackedDocuments:
    """The documents of each sample (batch, length), of which at least one has several.

    Each form is computed at most once, on the host, and then moved to the device. So one object
    serves all layers in a forward pass.
    """

    def __init__(self, documents: Tensor, device: torch.device) -> None:
        """`documents` numbers the document of each token.

        Raises `ValueError` if a document's tokens are not consecutive.
        """
        documents = documents.cpu()
        self.device = device
        self.batch, self.length = documents.shape
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = begins.flatten().nonzero().flatten()
        rows, numbers = starts // self.length, documents.flatten()[starts]
        if len(set(zip(rows.tolist(), numbers.tolist(), strict=True))) < len(starts):
            raise ValueError("documents: the tokens of a document must be consecutive")
        self._cumulative = torch.cat((starts, starts.new_tensor([documents.numel()])))
        lengths = self._cumulative.diff()
        self.num_tokens = [part.tolist() for part in lengths.split(begins.sum(1).tolist())]
        """The number of tokens of each document of each sample."""
        self.longest = int(lengths.max())
        """The number of tokens of the longest document."""
        first = (starts % self.length).repeat_interleave(lengths)
        self.first = first.view(self.batch, self.length).to(torch.int32)
        """For each token the position of its document's first token, int32, on the host."""
        self._pieces: dict[int, list[list[DocumentPiece]]] = {}

    @cached_property
    def cumulative(self) -> Tensor:
        """The start of each document in the batch's tokens, and their number; int32."""
        return self._cumulative.to(self.device, torch.int32)

    @cached_property
    def mask(self) -> Tensor:
        """The dense mask (batch, 1, length, length), True where a query may attend to a key."""
        return causal_mask(self.first.to(self.device))[:, None]

    def pieces(self, longest: int) -> list[list[DocumentPiece]]:
        """The pieces of each sample: as many documents as have at most `longest` tokens together,
        or one longer document."""
        if longest not in self._pieces:
            self._pieces[longest] = [
                self._pieces_of(row, groups(lengths, longest))
                for row, lengths in enumerate(self.num_tokens)
            ]
        return self._pieces[longest]

    def _pieces_of(self, row: int, grouped: list[list[int]]) -> list[DocumentPiece]:
        ends = list(accumulate(map(sum, grouped)))
        pieces = []
        for lengths, end in zip(grouped, ends, strict=True):
            begin = end - sum(lengths)
            mask = None
            if len(lengths) > 1:
                mask = causal_mask(self.first[row, begin:end] - begin).to(self.device)
            pieces.append(DocumentPiece(end - begin, mask))
        return pieces

    @cached_property
    def block_mask(self) -> BlockMask:
        """FlexAttention's mask, built from the documents' positions.

        `create_block_mask` would evaluate the mask for every query and key.
        """
        num_blocks = -(-self.length // BLOCK)
        blocks = torch.arange(num_blocks)
        lasts = (blocks * BLOCK + BLOCK - 1).clamp(max=self.length - 1)
        queries, keys = blocks[:, None], blocks
        first_visible = self.first[:, blocks * BLOCK, None]
        visible = (keys <= queries) & (first_visible < (keys + 1) * BLOCK)
        is_whole = (queries + 1) * BLOCK <= self.length
        begins_later = self.first[:, lasts, None] > keys * BLOCK
        full = (keys < queries) & is_whole & ~begins_later
        num_partial, partial = self._in_order(visible & ~full)
        num_full, full_first = self._in_order(full)
        return BlockMask.from_kv_blocks(
            num_partial,
            partial,
            num_full,
            full_first,
            BLOCK_SIZE=BLOCK,
            mask_mod=mask_function(self.first.to(self.device)),
            seq_lengths=(self.length, self.length),
        )

    def _in_order(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """For each block of queries the number of chosen blocks of keys, and all blocks of keys,
        the chosen ones first: int32, (batch, 1, blocks) and (batch, 1, blocks, blocks)."""
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        numbers, order = chosen.sum(-1).int()[:, None], order.int()[:, None]
        return numbers.to(self.device), order.to(self.device)


def groups(lengths: list[int], longest: int) -> list[list[int]]:
    """Consecutive lengths, joined while their sum is at most `longest`."""
    joined: list[list[int]] = []
    total = 0
    for length in lengths:
        if joined and total + length <= longest:
            joined[-1].append(length)
        else:
            joined.append([length])
            total = 0
        total += length
    return joined


def causal_mask(first: Tensor) -> Tensor:
    """True where a query may attend to a key: from the first token of its document to itself.

    `first` (..., length) is the first token's position for each query.
    """
    keys = torch.arange(first.shape[-1], device=first.device)
    return (first[..., None] <= keys).tril()


def mask_function(first: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's function for one query and key of sample `batch`."""

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[batch, query] <= key) & (key <= query)

    return is_visible
