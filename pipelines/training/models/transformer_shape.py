"""The parallel plan of the transformer: its pipeline layers, and what tp and ep shard."""

from __future__ import annotations

from math import gcd

from elastic.geometry.model_limits import Limits
from pipelines.settings import TransformerSettings
from pipelines.training.workload.workload import Layer, ModelShape, Style

ATTENTION: dict[str, Style] = {
    "embedding": "vocabulary",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward_norm": "sequence",
    "norm": "sequence",
    "head": "logits",
}
"""Shoeybi et al., Megatron-LM, 2019, with norms sharded over the sequence (Korthikanti et al.,
Reducing Activation Recomputation, 2022)."""

EXPERTS = "layers.*.feed_forward.experts"


def transformer_shape(settings: TransformerSettings, seq_len: int) -> ModelShape:
    """The pipeline layers are the embedding, each block, and the norm with the head."""
    experts = settings.experts
    blocks = (Layer((f"layers.{i}",), _cost(settings, seq_len)) for i in range(settings.num_layers))
    head = Layer(("norm", "head"), settings.dim * settings.vocab_size)
    layers = (Layer(("embedding",), settings.dim), *blocks, head)
    limits = Limits(
        tp_divides=gcd(settings.num_heads, settings.num_kv_heads, _width(settings)),
        num_layers=len(layers),
        seq_len=seq_len,
        num_experts=experts.num_experts if experts else 1,
    )
    feed_forward = "layers.*.feed_forward" + (".shared" if experts else "")
    styles = ATTENTION | _feed_forward(feed_forward)
    if experts:
        styles["layers.*.feed_forward.router"] = "replicated"
    return ModelShape(layers, limits, styles, (EXPERTS,) if experts else ())


def _width(settings: TransformerSettings) -> int:
    """The hidden width of the feed-forward that `tp` shards: with experts, of the shared one."""
    return settings.experts.shared_hidden_dim if settings.experts else settings.hidden_dim


def _cost(settings: TransformerSettings, seq_len: int) -> int:
    """Multiplications per token in one block."""
    dim, head_dim, experts = settings.dim, settings.dim // settings.num_heads, settings.experts
    attention = 2 * dim * dim + 2 * dim * settings.num_kv_heads * head_dim
    scores = dim * seq_len  # half of the products of queries with keys, and of weights with values
    hidden_dim = settings.hidden_dim
    if experts:
        hidden_dim = experts.top_k * experts.hidden_dim + experts.shared_hidden_dim
    return attention + scores + 3 * dim * hidden_dim


def _feed_forward(name: str) -> dict[str, Style]:
    return {
        name: "gather",
        f"{name}.w1": "colwise",
        f"{name}.w3": "colwise",
        f"{name}.w2": "rowwise",
    }
