"""Tiny configs of many architectures of `transformers`, and the axes over which each trains.

The tables of docs/architectures.md are written from this file, and its tests train each model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from elastic.geometry.layout import Layout
from elastic.geometry.model_limits import Limits
from pipelines.hugging_face.anatomy import anatomy_of
from pipelines.hugging_face.building import build
from pipelines.hugging_face.causal_lm import separates_documents
from pipelines.training.custom.custom_shape import shape_of
from pipelines.training.custom.parallel_styles import CustomCut

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""Fields that most architectures have; a config ignores those that it has not."""
NO_DROPOUT = dict.fromkeys(
    (
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
    ),
    0,
)
"""No dropout, which would refuse `tp` and `pp` for its own reason."""
HEADS = {"head_dim": 8}
"""For architectures whose default is not the hidden size divided by the number of heads."""
MIXTURE = {
    **HEADS,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": HEADS,
    "gemma": HEADS,
    "gemma2": HEADS,
    "gemma3_text": HEADS,
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "stablelm": {},
    "starcoder2": {"embedding_dropout": 0, "residual_dropout": 0},
    "cohere": {},
    "cohere2": {},
    "granite": {},
    "glm": HEADS,
    "glm4": HEADS,
    "smollm3": {},
    "exaone4": HEADS,
    "helium": HEADS,
    "ernie4_5": HEADS,
    "nemotron": HEADS,
    "gpt2": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {},
    "bloom": {},
    "mixtral": MIXTURE,
    "qwen2_moe": MIXTURE,
    "qwen3_moe": MIXTURE,
    "olmoe": MIXTURE,
    "granitemoe": MIXTURE,
    "gpt_oss": MIXTURE,
    "deepseek_v3": LATENT,
    "mamba": {},
}
"""What the config of each causal language model has besides the sizes, by its model type."""


@dataclass(frozen=True)
class Encoder:
    """What an encoder's config has besides the sizes, and the layers that `tp` shards."""

    fields: dict[str, Any]
    up: str = "encoder.layer.*.intermediate.dense"
    down: str = "encoder.layer.*.output.dense"
    prefix: str = ""


ENCODERS = {
    "bert": Encoder({}),
    "roberta": Encoder({"pad_token_id": 0}),
    "distilbert": Encoder(
        {"n_layers": 2, "n_heads": 4, "dim": 32, "hidden_dim": 48},
        "transformer.layer.*.ffn.lin1",
        "transformer.layer.*.ffn.lin2",
    ),
    "electra": Encoder({"embedding_size": 32}),
    "deberta-v2": Encoder({"pad_token_id": 0}, prefix="deberta"),
    "albert": Encoder(
        {"embedding_size": 32, "pad_token_id": 0},
        "encoder.albert_layer_groups.*.albert_layers.*.ffn",
        "encoder.albert_layer_groups.*.albert_layers.*.ffn_output",
    ),
    "modernbert": Encoder({"pad_token_id": 0}, up="", down=""),
}
"""Encoders by their model type; they train as custom recipes."""
AXES = {
    "dp": Layout(dp=2),
    "fsdp": Layout(fsdp=2),
    "tp": Layout(tp=2),
    "pp": Layout(pp=2),
    "cp": Layout(cp=2),
    "ep": Layout(fsdp=2, ep=2),
}
"""The smallest layout with each axis."""


def fields_of(family: str) -> dict[str, Any]:
    """The tiny config of a causal language model in the table."""
    return {"model_type": family, **SIZES, **NO_DROPOUT, **CAUSAL[family]}


def sees_documents(family: str) -> bool:
    """Whether the documents of a sequence are separated; else the data must not have them."""
    return separates_documents(build(fields_of(family)))


def refusals(family: str) -> dict[str, str | None]:
    """Why a causal language model in the table cannot be trained over each axis, or None."""
    return refusals_by(anatomy_of(build(fields_of(family))).shape.limits)


def refusals_by(limits: Limits) -> dict[str, str | None]:
    """Why these limits refuse each axis, without the axis' name, or None."""
    return {
        axis: reason and re.sub(rf"^{axis}=2: ", "", reason)
        for axis, reason in ((axis, limits.refusal(layout)) for axis, layout in AXES.items())
    }


def encoder_fields(family: str) -> dict[str, Any]:
    """The tiny config of an encoder in the table."""
    return {"model_type": family, **SIZES, **NO_DROPOUT, **ENCODERS[family].fields}


def encoder_plan(family: str) -> dict[str, CustomCut]:
    """The plan of an encoder's recipe: its feed-forward layers, if one function separates them."""
    encoder = ENCODERS[family]
    prefix = encoder.prefix or family
    if not encoder.up:
        return {}
    return {f"{prefix}.{encoder.up}": "colwise", f"{prefix}.{encoder.down}": "rowwise"}


def encoder_refusals(model: nn.Module, family: str) -> dict[str, str | None]:
    """Why an encoder in the table cannot be trained over each axis by a custom recipe, or None."""
    return refusals_by(shape_of(model, encoder_plan(family)).limits)


def table(rows: Mapping[str, Mapping[str, str | None]], short: Mapping[str, str]) -> str:
    """A Markdown table of the axes of each architecture.

    A cell is `yes` or a short form of the reason: `short` has it by a part of the reason.
    """
    lines = [f"| `model_type` | {' | '.join(f'`{axis}`' for axis in AXES)} |"]
    lines.append("|---" * (len(AXES) + 1) + "|")
    for family, reasons in rows.items():
        cells = [_short(reasons[axis], short) for axis in AXES]
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _short(reason: str | None, short: Mapping[str, str]) -> str:
    if reason is None:
        return "yes"
    [form] = {form for part, form in short.items() if part in reason}
    return form
