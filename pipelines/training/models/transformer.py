"""A decoder-only transformer of the Llama family."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipelines.settings import TransformerSettings
from pipelines.training.attention.document_attention import DocumentAttention
from pipelines.training.attention.ring_attention import ring_attention
from pipelines.training.attention.rotary import rotary, rotate
from pipelines.training.models.experts import FeedForward, MixtureOfExperts
from pipelines.training.models.keyed_dropout import KeyedDropout
from pipelines.training.workload.parallel_groups import ALONE, ParallelGroups
from pipelines.training.workload.ring import positions


class Frame(NamedTuple):
    """Inputs that all layers share in one forward pass: the full sequence length, the rotary angles
    of this rank's tokens, the attention of whole sequences or the documents of sharded ones, and
    the dropout seed of each microbatch of the pass."""

    length: int
    rotation: Tensor
    attend: DocumentAttention | None
    documents: Tensor | None
    seeds: tuple[int, ...] | None
    is_padding: bool


class Transformer(nn.Module):
    """Tokens to next-token logits (Touvron et al., Llama, 2023), or a pipeline stage of it.

    `forward(tokens, documents, seeds)` takes int64 tokens (batch, length) and returns logits
    (batch, length, vocabulary). `documents` is None or the document number of each token (batch,
    length), int, on the host; tokens do not attend across documents, and those of a document must
    be consecutive. `seeds` is None or the random seed of each sample's microbatch (batch,),
    negative for padding. A stage without embedding takes hidden states (batch, length, dim); one
    without head returns them. If `parallel` shards the sequence, `length` is this rank's part,
    except in `documents`.
    """

    def __init__(self, settings: TransformerSettings, parallel: ParallelGroups = ALONE) -> None:
        super().__init__()
        self.settings = settings
        self.parallel = parallel
        self.embedding = nn.Embedding(settings.vocab_size, settings.dim)
        blocks = {
            str(i): TransformerBlock(settings, parallel, i) for i in range(settings.num_layers)
        }
        self.layers = nn.ModuleDict(blocks)
        self.norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.head = nn.Linear(settings.dim, settings.vocab_size, bias=False)

    def forward(
        self, hidden: Tensor, documents: Tensor | None = None, seeds: Tensor | None = None
    ) -> Tensor:
        length = hidden.shape[1] if self.parallel.has_whole_sequences else self.parallel.seq_len
        frame = self._frame(length, documents, seeds, hidden.device)
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden, frame)
        if self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden

    def _frame(
        self, length: int, documents: Tensor | None, seeds: Tensor | None, device: torch.device
    ) -> Frame:
        settings, parallel = self.settings, self.parallel
        held = positions(length, parallel.cp_rank, parallel.num_cp).to(device)
        head_dim = settings.dim // settings.num_heads
        each = () if seeds is None else tuple(seeds.unique_consecutive().tolist())
        is_whole = parallel.cp is None
        return Frame(
            length,
            rotary(held, head_dim, settings.rope_theta),
            DocumentAttention(documents, device) if is_whole else None,
            None if is_whole else documents,
            each if each and settings.dropout and self.training else None,
            is_padding=bool(each) and each[0] < 0,
        )


class TransformerBlock(nn.Module):
    """One pre-norm layer: attention and feed-forward, each with a residual connection."""

    def __init__(
        self, settings: TransformerSettings, parallel: ParallelGroups, number: int
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.attention = Attention(settings, parallel)
        self.feed_forward_norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.feed_forward = (
            MixtureOfExperts(settings.dim, settings.experts, parallel)
            if settings.experts
            else FeedForward(settings.dim, settings.hidden_dim)
        )
        self.attention_dropout = KeyedDropout(settings.dropout, parallel, 2 * number)
        self.feed_forward_dropout = KeyedDropout(settings.dropout, parallel, 2 * number + 1)

    def forward(self, hidden: Tensor, frame: Frame) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), frame=frame)
        hidden = hidden + self.attention_dropout(attended, frame.seeds)
        normed = self.feed_forward_norm(hidden)
        if isinstance(self.feed_forward, MixtureOfExperts):
            output = self.feed_forward(normed, counted=not frame.is_padding)
        else:
            output = self.feed_forward(normed)
        total: Tensor = hidden + self.feed_forward_dropout(output, frame.seeds)
        return total


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads (Ainslie et al., GQA, 2023)."""

    def __init__(self, settings: TransformerSettings, parallel: ParallelGroups) -> None:
        super().__init__()
        self.ring = parallel.cp
        self.head_dim = settings.dim // settings.num_heads
        kv_dim = settings.num_kv_heads * self.head_dim
        self.wq = nn.Linear(settings.dim, settings.dim, bias=False)
        self.wk = nn.Linear(settings.dim, kv_dim, bias=False)
        self.wv = nn.Linear(settings.dim, kv_dim, bias=False)
        self.wo = nn.Linear(settings.dim, settings.dim, bias=False)

    def forward(self, hidden: Tensor, frame: Frame) -> Tensor:
        query, key, value = (
            linear(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        query, key = rotate(query, frame.rotation), rotate(key, frame.rotation)
        if self.ring is not None:
            attended = ring_attention(query, key, value, frame.length, self.ring, frame.documents)
        else:
            assert frame.attend is not None
            attended = frame.attend(query, key, value)
        output: Tensor = self.wo(attended.transpose(1, 2).flatten(2))
        return output


def initial_std(name: str, settings: TransformerSettings) -> float:
    """The standard deviation of a weight at step 0: 0.02, divided by `sqrt(2 layers)` for weights
    that add to the residual stream (Radford et al., GPT-2, 2019)."""
    residual = name.endswith(("attention.wo.weight", ".w2.weight", "experts.w2"))
    return 0.02 / math.sqrt(2 * settings.num_layers) if residual else 0.02
