"""Which tensor of ours lies where in which one of theirs, of Llama and of a mixture of experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from elastic.regions import Region
from pipelines.settings import TransformerSettings
from pipelines.training.model import Transformer

Shape = tuple[int, ...]


class Place(NamedTuple):
    """A tensor of theirs, of which ours is part `index` of `num_parts` equal ones along `dim`."""

    name: str
    dim: int = 0
    index: int = 0
    num_parts: int = 1

    def shape(self, ours: Shape) -> Shape:
        """Of their whole tensor, if ours is of this shape."""
        return (*ours[: self.dim], self.num_parts * ours[self.dim], *ours[self.dim + 1 :])

    def region(self, ours: Shape, region: Region) -> Region:
        """The region of theirs that is this region of ours."""
        offsets = list(region.offsets)
        offsets[self.dim] += self.index * ours[self.dim]
        return Region(tuple(offsets), region.shape)


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LAYER = "model.layers.*."

COMMON = {
    "embedding.weight": Place(EMBEDDING),
    "layers.*.attention_norm.weight": Place(LAYER + "input_layernorm.weight"),
    "layers.*.attention.wq.weight": Place(LAYER + "self_attn.q_proj.weight"),
    "layers.*.attention.wk.weight": Place(LAYER + "self_attn.k_proj.weight"),
    "layers.*.attention.wv.weight": Place(LAYER + "self_attn.v_proj.weight"),
    "layers.*.attention.wo.weight": Place(LAYER + "self_attn.o_proj.weight"),
    "layers.*.feed_forward_norm.weight": Place(LAYER + "post_attention_layernorm.weight"),
    "norm.weight": Place("model.norm.weight"),
    "head.weight": Place(HEAD),
}
"""Both turn the pairs (i, i + head_dim / 2) of a head, so that no weight is permuted."""

DENSE = {
    "layers.*.feed_forward.w1.weight": Place(LAYER + "mlp.gate_proj.weight"),
    "layers.*.feed_forward.w3.weight": Place(LAYER + "mlp.up_proj.weight"),
    "layers.*.feed_forward.w2.weight": Place(LAYER + "mlp.down_proj.weight"),
}
"""LlamaForCausalLM."""

MOE = LAYER + "block_sparse_moe."
SHARED = LAYER + "shared_mlp."

MIXTURE = {
    "layers.*.feed_forward.router.weight": Place(MOE + "router.layer.weight"),
    "layers.*.feed_forward.experts.w1": Place(MOE + "input_linear.weight", 1, 0, 2),
    "layers.*.feed_forward.experts.w3": Place(MOE + "input_linear.weight", 1, 1, 2),
    "layers.*.feed_forward.experts.w2": Place(MOE + "output_linear.weight"),
    "layers.*.feed_forward.shared.w1.weight": Place(SHARED + "input_linear.weight", 0, 0, 2),
    "layers.*.feed_forward.shared.w3.weight": Place(SHARED + "input_linear.weight", 0, 1, 2),
    "layers.*.feed_forward.shared.w2.weight": Place(SHARED + "output_linear.weight"),
}
"""GraniteMoeSharedForCausalLM: as ours, its router takes the softmax over the chosen logits alone,
and its shared expert has no gate."""


PLACES: Mapping[str, Place] = COMMON | DENSE | MIXTURE


def parameter_shapes(model: TransformerSettings) -> dict[str, Shape]:
    """Our parameters by name, in the module's order."""
    with torch.device("meta"):
        module = Transformer(model)
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


def place_of(name: str) -> Place:
    """Where a parameter of ours lies among theirs."""
    number = re.search(r"\.(\d+)\.", name)
    place = PLACES[re.sub(r"\.\d+\.", ".*.", name)]
    return place._replace(name=place.name.replace("*", number[1])) if number else place


class Part(NamedTuple):
    """A tensor of ours, and the region that it is of one of theirs."""

    name: str
    region: Region


class Whole(NamedTuple):
    """A tensor of theirs, and those of ours that make it up."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]


def their_tensors(model: TransformerSettings) -> list[Whole]:
    """Every tensor that a folder of theirs holds of a model, in the order of its layers."""
    shapes: dict[str, Shape] = {}
    parts: dict[str, list[Part]] = {}
    for name, shape in parameter_shapes(model).items():
        place = place_of(name)
        shapes[place.name] = place.shape(shape)
        region = place.region(shape, Region.whole(shape))
        parts.setdefault(place.name, []).append(Part(name, region))
    return [Whole(name, shape, tuple(parts[name])) for name, shape in shapes.items()]
