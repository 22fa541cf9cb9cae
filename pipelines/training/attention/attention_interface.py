"""Ring attention as an attention function of `transformers`, and the trial that it fits a model."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipelines.data.transformers_library import library
from pipelines.training.attention.ring_attention import ring_attention

NAME = "elastic_ring"
"""Under this name `transformers` makes no mask: the ring knows positions and documents."""
TRIED_LENGTH = 4
HARMLESS = ("dropout", "is_causal", "position_ids", "position_embeddings", "cache_position")
"""Options of attention that do not change plain causal attention; dropout is refused elsewhere."""
VARYING_ROTARY = ("dynamic", "longrope")
"""Rotary embeddings that look at the largest position of a pass."""
OTHER_MASKS = ("sliding_window", "attention_chunk_size")
"""Config fields because of which tokens do not attend to all earlier ones."""


class RingOption(Protocol):
    """What a model passes on to its attention functions as the option `ring`."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """The attended values, as `query` (batch, heads, length, head_dim)."""


class RingPass:
    """The attention of one pass over sequences whose tokens are sharded over a group.

    `documents` (batch, length) numbers the document of each token of the whole sequences.
    """

    def __init__(self, group: ProcessGroup, documents: Tensor) -> None:
        self.group = group
        self.documents = documents

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        scaling, usual = options.get("scaling"), 1 / math.sqrt(query.shape[-1])
        if scaling is not None and scaling != usual:
            query = query * (scaling / usual)
        length = self.documents.shape[1]
        return ring_attention(query, key, value, length, self.group, self.documents)


class _Trial:
    """Counts the calls of attention, and notes why one is not plain causal attention."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.problem = ""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        self.num_calls += 1
        for name, option in options.items():
            is_set = option is not None and option is not False
            if is_set and name not in (*HARMLESS, "scaling"):
                self.problem = f"its attention has {name}"
        if getattr(module, "is_causal", True) is False:
            self.problem = "its attention is not causal"
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            self.problem = "its heads have keys and values of different sizes"
        if query.shape[2] != TRIED_LENGTH or key.shape[2] != TRIED_LENGTH:
            self.problem = "its attention is not between the tokens of a sequence"
        return query


@cache
def register() -> None:
    """Make the attention function known to `transformers`, under its name."""
    library().AttentionInterface.register(NAME, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ring: RingOption,
    **options: Any,
) -> tuple[Tensor, None]:
    attended = ring.attend(module, query, key, value, options)
    return attended.transpose(1, 2).contiguous(), None


class _Unchanged(nn.Module):
    """Takes the place of experts in the trial, which need values that a meta tensor has not."""

    def forward(self, hidden: Tensor, *inputs: Any) -> Tensor:
        return hidden


def why_no_ring(model: nn.Module, num_blocks: int) -> str:
    """Why ring attention cannot be a model's attention, or ''.

    A copy of the model runs on the meta device, where it must call plain causal attention once in
    each of its blocks.
    """
    config: Any = model.config
    text = config.get_text_config()
    for name in OTHER_MASKS:
        if getattr(text, name, None):
            return f"{name}={getattr(text, name)}: cp needs attention to all earlier tokens"
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"its layers have {min(kinds)}: cp needs attention to all earlier tokens"
    if rotary := _varying_rotary(getattr(text, "rope_parameters", None)):
        return f"rope_type={rotary}: its angles depend on the length, of which a rank has a part"
    register()
    trial = _Trial()
    options = {"attn_implementation": NAME, "experts_implementation": "eager"}
    try:
        with torch.device("meta"), torch.no_grad():
            copied = library().AutoModelForCausalLM.from_config(deepcopy(config), **options)
            for name, _ in list(copied.named_modules()):
                owner, _, child = name.rpartition(".")
                if child == "experts":
                    setattr(copied.get_submodule(owner), child, _Unchanged())
            tokens = torch.zeros(1, TRIED_LENGTH, dtype=torch.int64)
            copied(tokens, position_ids=tokens, use_cache=False, ring=trial)
    except Exception as error:  # a model's own code raises any type
        return f"its attention cannot be replaced ({type(error).__name__})"
    if trial.num_calls != num_blocks:
        return "some of its layers mix tokens without the attention interface of transformers"
    return trial.problem


def _varying_rotary(parameters: Any) -> str:
    """The type of rotary embedding that depends on the length of a pass, or ''."""
    if not isinstance(parameters, dict):
        return ""
    if parameters.get("rope_type") in VARYING_ROTARY:
        return str(parameters["rope_type"])
    return next(filter(None, map(_varying_rotary, parameters.values())), "")
