"""A decoder-only transformer of the Llama family."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipelines.settings import TransformerSettings
from pipelines.training.experts import MixtureOfExperts
from pipelines.training.feed_forward import FeedForward


class Transformer(nn.Module):
    """Tokens to next-token logits (Touvron et al., Llama, 2023).

    `forward(tokens, mask, counted)` takes int64 tokens (batch, length) and None or a boolean mask
    (batch, 1, length, length), True where a query may attend; without one attention is causal.
    `counted` is False for a batch that is but padding: it has no balance loss of experts.
    Returns logits (batch, length, vocabulary).
    """

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.vocab_size, settings.dim)
        self.layers = nn.ModuleList(Block(settings) for _ in range(settings.num_layers))
        self.norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.head = nn.Linear(settings.dim, settings.vocab_size, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, counted: bool = True) -> Tensor:
        head_dim = self.settings.dim // self.settings.num_heads
        rotation = rotary(tokens.shape[1], head_dim, self.settings.rope_theta, tokens.device)
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, rotation, mask, counted)
        return self.head(self.norm(hidden))


class Block(nn.Module):
    """One layer: attention and feed-forward, each normalised first and added to its input."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.attention = Attention(settings)
        self.feed_forward_norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.feed_forward = (
            MixtureOfExperts(settings.dim, settings.experts)
            if settings.experts
            else FeedForward(settings.dim, settings.hidden_dim)
        )
        self.dropout = nn.Dropout(settings.dropout)

    def forward(
        self, hidden: Tensor, rotation: Tensor, mask: Tensor | None, counted: bool = True
    ) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), rotation, mask)
        hidden = hidden + self.dropout(attended)
        normed = self.feed_forward_norm(hidden)
        if isinstance(self.feed_forward, MixtureOfExperts):
            return hidden + self.dropout(self.feed_forward(normed, counted))
        return hidden + self.dropout(self.feed_forward(normed))


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads (Ainslie et al., GQA, 2023)."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.head_dim = settings.dim // settings.num_heads
        kv_dim = settings.num_kv_heads * self.head_dim
        self.wq = nn.Linear(settings.dim, settings.dim, bias=False)
        self.wk = nn.Linear(settings.dim, kv_dim, bias=False)
        self.wv = nn.Linear(settings.dim, kv_dim, bias=False)
        self.wo = nn.Linear(settings.dim, settings.dim, bias=False)

    def forward(self, hidden: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (
            linear(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        attended = functional.scaled_dot_product_attention(
            rotate(query, rotation),
            rotate(key, rotation),
            value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.wo(attended.transpose(1, 2).flatten(2))


def rotary(length: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines of each position's angles, float64, shape (2, length, head_dim / 2).

    Su et al., RoFormer, 2021: angle `position * theta ** (-2 i / head_dim)`.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device=device), theta**-powers)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Heads (batch, heads, length, head_dim), each pair (i, i + head_dim / 2) turned in float32
    or better."""
    exact = torch.promote_types(heads.dtype, torch.float32)
    cosine, sine = rotation.to(exact)
    first, second = heads.to(exact).chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(heads.dtype)


def document_mask(documents: Tensor, device: torch.device) -> Tensor | None:
    """True where a query may attend to a key: the same document, and not later.

    `documents` (batch, length), on the host, numbers the document of each token. None if no
    sample holds more than one: then plain causal attention says the same and is faster.
    """
    if bool((documents == documents[:, :1]).all()):
        return None
    documents = documents.to(device)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


def initial_std(name: str, settings: TransformerSettings) -> float:
    """The standard deviation of a weight at step 0 (Radford et al., GPT-2, 2019: 0.02, and
    smaller by `sqrt(2 layers)` where a layer adds to the residual stream)."""
    experts = ("feed_forward.w2", "feed_forward.shared.w2.weight")
    residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight", *experts))
    return 0.02 / math.sqrt(2 * settings.num_layers) if residual else 0.02
