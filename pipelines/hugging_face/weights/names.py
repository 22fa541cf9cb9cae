"""Tensor names and shapes of exported models, and their mapping to our transformer's parameters.

The built-in transformer maps to `LlamaForCausalLM` or, with experts, `GraniteMoeSharedForCausalLM`.
A model that `transformers` builds keeps its own names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from elastic.geometry.regions import Region
from pipelines.data.cache import local_folder
from pipelines.hugging_face.building import build
from pipelines.settings import HuggingFaceSettings, TrainSettings, TransformerSettings
from pipelines.training.models.transformer import Transformer
from pipelines.training.workload.state import buffers

TensorShape = tuple[int, ...]


class TensorPlace(NamedTuple):
    """The place of one of our parameters in a stored tensor.

    The parameter is part `part` of `num_parts` equal parts along dim `dim` of the tensor `name`.
    """

    name: str
    dim: int = 0
    part: int = 0
    num_parts: int = 1

    def shape(self, shape: TensorShape) -> TensorShape:
        """The shape of the stored tensor, if our parameter has this shape."""
        return (*shape[: self.dim], self.num_parts * shape[self.dim], *shape[self.dim + 1 :])

    def region(self, shape: TensorShape, region: Region) -> Region:
        """The region of the stored tensor that is this region of our parameter."""
        offsets = list(region.offsets)
        offsets[self.dim] += self.part * shape[self.dim]
        return Region(tuple(offsets), region.shape)


class TensorPart(NamedTuple):
    """One of our tensors, and the region of a stored tensor that it is."""

    name: str
    region: Region


class StoredTensor(NamedTuple):
    """A tensor of an exported file, and our tensors that make it up."""

    name: str
    shape: TensorShape
    parts: tuple[TensorPart, ...]


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
"""Both models rotate the pairs (i, i + head_dim / 2) of a head, so no weight is permuted."""
DENSE = {
    "layers.*.feed_forward.w1.weight": TensorPlace(LAYER + "mlp.gate_proj.weight"),
    "layers.*.feed_forward.w3.weight": TensorPlace(LAYER + "mlp.up_proj.weight"),
    "layers.*.feed_forward.w2.weight": TensorPlace(LAYER + "mlp.down_proj.weight"),
}
"""The feed-forward network of LlamaForCausalLM."""
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
"""The experts of GraniteMoeSharedForCausalLM: like our model, its router takes the softmax over
the chosen logits alone, and its shared expert has no gate."""
PLACES: Mapping[str, TensorPlace] = COMMON | DENSE | MIXTURE
AUXILIARY_FILES = (
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


def place_of(name: str) -> TensorPlace:
    """The place of one of our transformer's parameters."""
    number = re.search(r"\.(\d+)\.", name)
    place = PLACES[re.sub(r"\.\d+\.", ".*.", name)]
    return place._replace(name=place.name.replace("*", number[1])) if number else place


def parameter_shapes(model: TransformerSettings) -> dict[str, TensorShape]:
    """The parameters of our transformer by name, in the module's order."""
    with torch.device("meta"):
        module = Transformer(model)
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


def transformer_tensors(model: TransformerSettings) -> list[StoredTensor]:
    """Every stored tensor of our transformer, in the order of its layers."""
    shapes: dict[str, TensorShape] = {}
    parts: dict[str, list[TensorPart]] = {}
    for name, shape in parameter_shapes(model).items():
        place = place_of(name)
        shapes[place.name] = place.shape(shape)
        region = place.region(shape, Region.whole(shape))
        parts.setdefault(place.name, []).append(TensorPart(name, region))
    return [StoredTensor(name, shape, tuple(parts[name])) for name, shape in shapes.items()]


def hugging_face_tensors(model: HuggingFaceSettings) -> list[StoredTensor]:
    """Every stored tensor of a model that `transformers` builds.

    These are its parameters, each once even if it has several names, and its persistent buffers.
    """
    shapes = _shapes(build(model.config))
    return [stored_whole(name, tuple(shape)) for name, shape in shapes.items()]


def stored_whole(name: str, shape: tuple[int, ...], stored_as: str | None = None) -> StoredTensor:
    """A stored tensor that is one of our tensors."""
    return StoredTensor(stored_as or name, shape, (TensorPart(name, Region.whole(shape)),))


def stored_config(model: HuggingFaceSettings, dtype: str) -> dict[str, Any]:
    """The run's `config.json`, with the dtype of the exported tensors."""
    architecture = type(build(model.config)).__name__
    return model.config | {"architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}


def auxiliary_files(settings: TrainSettings) -> list[Path]:
    """The tokenizer and generation files in the folder that the run's weights came from."""
    if not isinstance(settings.model, HuggingFaceSettings) or settings.init_from is None:
        return []
    folder = local_folder(settings.init_from, settings.cache)
    files = (folder / name for name in AUXILIARY_FILES)
    return [file for file in files if file.is_file()]


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    named = [*model.named_parameters(), *buffers(model)]
    return {name: tuple(value.shape) for name, value in named}
