"""Which tensor of ours lies where in which one of theirs, of Llama and of a mixture of experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from elastic.geometry.regions import Region
from pipelines.hugging_face.building import build
from pipelines.settings import HuggingFaceSettings, TrainSettings, TransformerSettings
from pipelines.training.models.transformer import Transformer
from pipelines.training.workload.state import buffers

TensorShape = tuple[int, ...]


class TensorPlace(NamedTuple):
    """A tensor of theirs, of which ours is part `index` of `num_parts` equal ones along `dim`."""

    name: str
    dim: int = 0
    index: int = 0
    num_parts: int = 1

    def shape(self, ours: TensorShape) -> TensorShape:
        """Of their whole tensor, if ours is of this shape."""
        return (*ours[: self.dim], self.num_parts * ours[self.dim], *ours[self.dim + 1 :])

    def region(self, ours: TensorShape, region: Region) -> Region:
        """The region of theirs that is this region of ours."""
        offsets = list(region.offsets)
        offsets[self.dim] += self.index * ours[self.dim]
        return Region(tuple(offsets), region.shape)


EMBEDDING = "model.embed_tokens.weight"

HEAD = "lm_head.weight"

LAYER = "model.layers.*."

COMMON = {
    "embedding.weight": TensorPlace(EMBEDDING),
    "layers.*.attention_norm.weight": TensorPlace(LAYER + "input_layernorm.weight"),
    "layers.*.attention.wq.weight": TensorPlace(LAYER + "self_attn.q_proj.weight"),
    "layers.*.attention.wk.weight": TensorPlace(LAYER + "self_attn.k_proj.weight"),
    "layers.*.attention.wv.weight": TensorPlace(LAYER + "self_attn.v_proj.weight"),
    "layers.*.attention.wo.weight": TensorPlace(LAYER + "self_attn.o_proj.weight"),
    "layers.*.feed_forward_norm.weight": TensorPlace(LAYER + "post_attention_layernorm.weight"),
    "norm.weight": TensorPlace("model.norm.weight"),
    "head.weight": TensorPlace(HEAD),
}
"""Both turn the pairs (i, i + head_dim / 2) of a head, so that no weight is permuted."""

DENSE = {
    "layers.*.feed_forward.w1.weight": TensorPlace(LAYER + "mlp.gate_proj.weight"),
    "layers.*.feed_forward.w3.weight": TensorPlace(LAYER + "mlp.up_proj.weight"),
    "layers.*.feed_forward.w2.weight": TensorPlace(LAYER + "mlp.down_proj.weight"),
}
"""LlamaForCausalLM."""

MOE = LAYER + "block_sparse_moe."

SHARED = LAYER + "shared_mlp."

MIXTURE = {
    "layers.*.feed_forward.router.weight": TensorPlace(MOE + "router.layer.weight"),
    "layers.*.feed_forward.experts.w1": TensorPlace(MOE + "input_linear.weight", 1, 0, 2),
    "layers.*.feed_forward.experts.w3": TensorPlace(MOE + "input_linear.weight", 1, 1, 2),
    "layers.*.feed_forward.experts.w2": TensorPlace(MOE + "output_linear.weight"),
    "layers.*.feed_forward.shared.w1.weight": TensorPlace(SHARED + "input_linear.weight", 0, 0, 2),
    "layers.*.feed_forward.shared.w3.weight": TensorPlace(SHARED + "input_linear.weight", 0, 1, 2),
    "layers.*.feed_forward.shared.w2.weight": TensorPlace(SHARED + "output_linear.weight"),
}
"""GraniteMoeSharedForCausalLM: as ours, its router takes the softmax over the chosen logits alone,
and its shared expert has no gate."""

PLACES: Mapping[str, TensorPlace] = COMMON | DENSE | MIXTURE


def parameter_shapes(model: TransformerSettings) -> dict[str, TensorShape]:
    """Our parameters by name, in the module's order."""
    with torch.device("meta"):
        module = Transformer(model)
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


def place_of(name: str) -> TensorPlace:
    """Where a parameter of ours lies among theirs."""
    number = re.search(r"\.(\d+)\.", name)
    place = PLACES[re.sub(r"\.\d+\.", ".*.", name)]
    return place._replace(name=place.name.replace("*", number[1])) if number else place


class TensorPart(NamedTuple):
    """A tensor of ours, and the region that it is of one of theirs."""

    name: str
    region: Region


class Whole(NamedTuple):
    """A tensor of theirs, and those of ours that make it up."""

    name: str
    shape: TensorShape
    parts: tuple[TensorPart, ...]


def their_tensors(model: TransformerSettings) -> list[Whole]:
    """Every tensor that a folder of theirs holds of a model, in the order of its layers."""
    shapes: dict[str, TensorShape] = {}
    parts: dict[str, list[TensorPart]] = {}
    for name, shape in parameter_shapes(model).items():
        place = place_of(name)
        shapes[place.name] = place.shape(shape)
        region = place.region(shape, Region.whole(shape))
        parts.setdefault(place.name, []).append(TensorPart(name, region))
    return [Whole(name, shape, tuple(parts[name])) for name, shape in shapes.items()]


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def own_tensors(model: HuggingFaceSettings) -> list[Whole]:
    """Each parameter once, however many names it has, and each buffer that is state."""
    return [whole(name, tuple(shape)) for name, shape in _shapes(build(model.config)).items()]


def whole(name: str, shape: tuple[int, ...], stored_as: str | None = None) -> Whole:
    """A tensor of ours that lies there whole."""
    return Whole(stored_as or name, shape, (TensorPart(name, Region.whole(shape)),))


def stored_config(model: HuggingFaceSettings, dtype: str) -> dict[str, Any]:
    """The `config.json` that the run was given, in the dtype of what is written."""
    architecture = type(build(model.config)).__name__
    return model.config | {"architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}


def files_beside(settings: TrainSettings) -> list[Path]:
    """The tokenizer's and others that the folder had which the run began with."""
    if not isinstance(settings.model, HuggingFaceSettings) or settings.init_from is None:
        return []
    files = (Path(settings.init_from) / name for name in TOKENIZER_FILES)
    return [file for file in files if file.is_file()]


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    named = [*model.named_parameters(), *buffers(model)]
    return {name: tuple(value.shape) for name, value in named}
