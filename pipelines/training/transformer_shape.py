"""How a transformer may be spread: its layers for the pipeline, and what tp and ep cut."""

from __future__ import annotations

from math import gcd

from elastic.limits import Limits
from pipelines.settings import TransformerSettings
from pipelines.training.workload import Layer, Shape, Style

STYLES: dict[str, Style] = {
    "embedding": "vocabulary",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward_norm": "sequence",
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "sequence",
    "head": "logits",
}
"""Shoeybi et al., Megatron-LM, 2019, with the norms spread over the sequence (Korthikanti et
al., Reducing Activation Recomputation, 2022)."""


def transformer_shape(settings: TransformerSettings, seq_len: int) -> Shape:
    """The embedding, each block, and the norm with the head are layers of the pipeline."""
    dim, head_dim = settings.dim, settings.dim // settings.num_heads
    attention = 2 * dim * dim + 2 * dim * settings.num_kv_heads * head_dim
    scores = dim * seq_len  # half of the products of all queries and keys, and of the values
    block = attention + scores + 3 * dim * settings.hidden_dim
    blocks = (Layer((f"layers.{i}",), block) for i in range(settings.num_layers))
    head = Layer(("norm", "head"), dim * settings.vocab_size)
    layers = (Layer(("embedding",), dim), *blocks, head)
    limits = Limits(
        tp_divides=gcd(settings.num_heads, settings.num_kv_heads),
        num_layers=len(layers),
        seq_len=seq_len,
        num_experts=1,
    )
    return Shape(layers, limits, STYLES)
