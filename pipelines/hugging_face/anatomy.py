"""The parts of a `transformers` model, and how its tensor and pipeline plans shard them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from torch import nn

from elastic.geometry.model_limits import Limits
from pipelines.hugging_face.building import (
    input_embedding,
    output_embedding,
    pipeline_plan,
    tensor_plan,
    text_config,
)
from pipelines.hugging_face.placeholders import placeholder_for, why_not_in_stages
from pipelines.hugging_face.routing.router_loss import OPTION, has_router_loss
from pipelines.hugging_face.routing.stacked_experts import stacked_experts
from pipelines.hugging_face.transformers_private import undivided_classes
from pipelines.training.attention.attention_interface import why_no_ring
from pipelines.training.workload.layer_tensors import other_tie
from pipelines.training.workload.workload import Layer, ModelShape, Style

STYLES: dict[str, Style | None] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "embedding_rowwise": "vocabulary",
    "colwise_gather_output": "colwise_gathered",
    "rowwise_split_input": "rowwise",
    "replicated_with_grad_allreduce": "partial",
    "replicate": None,
}
"""Our sharding style by the style's name in a `transformers` plan; None: replicated."""

CUT = {"colwise", "rowwise", "colwise_gathered"}
"""The styles of linear layers whose width `tp` divides."""

EXPERTS = "moe_tp_experts"
"""The plan's style of experts, which `ep` shards here, never `tp`."""

PART_ALONE = (
    "the load-balancing loss of routers is not linear in the tokens and layers of a microbatch, of "
    f"which a rank has a part: --set model.config.{OPTION}=false"
)
NOISE = ("jitter",)
RANDOM_FIELDS = ("dropout", "pdrop", *NOISE)
"""Parts of the names of config fields that make a pass draw torch's random numbers."""
OTHER_HEADS = ("classifier", "summary")
"""Prefixes of such fields that belong to other heads than the language model's."""


@dataclass(frozen=True)
class Anatomy:
    """The names of a model's embedding, decoder layers and head, and its sharding limits."""

    embedding: str
    blocks: tuple[str, ...]
    head: str
    shape: ModelShape
    is_head_cut: bool


def anatomy_of(model: nn.Module) -> Anatomy:
    """The anatomy of a model on the meta device."""
    names = {module: name for name, module in model.named_modules()}
    embedding = names.get(input_embedding(model), "")
    logits = output_embedding(model)
    head = names.get(logits, "") if logits is not None else ""
    blocks = _blocks(model)
    styles, no_tp = _styles(model, head)
    layers, no_pp = _layers(model, blocks, embedding, head)
    randomness = why_random(model.config)
    part_alone = PART_ALONE if has_router_loss(model) else ""
    no_pp = no_pp or part_alone
    if not no_pp:
        modules = [name for layer in layers for name in layer.modules]
        no_pp = why_not_in_stages(model, modules, draws=bool(randomness))
        if no_pp and randomness:
            no_pp = f"{randomness}, or pp=1: {no_pp}"
    no_cp = randomness or part_alone or why_no_ring(model, len(blocks))
    # Each rank draws for the whole activations of a layer; experts read values, so that it is
    # unknown which these are.
    has_layers = any(layer.modules for layer in layers)
    experts = stacked_experts(model)
    is_known = has_layers and not (experts.names or experts.problem)
    no_tp = no_tp or why_random(model.config, NOISE if is_known else RANDOM_FIELDS)
    reasons = {"cp": no_cp, "ep": experts.problem, "tp": no_tp, "pp": no_pp}
    refused = [(axis, reason) for axis, reason in reasons.items() if reason]
    limits = Limits(
        tp_divides=1 if no_tp else _divisor(model, styles),
        num_layers=len(layers),
        num_experts=experts.num_experts,
        refused=tuple(refused),
    )
    shape = ModelShape(
        layers,
        limits,
        {} if no_tp else styles,
        experts.names,
        sequence_parallel=False,
        make_substitute=placeholder_for,
    )
    return Anatomy(embedding, blocks, head, shape, shape.style_of(head) == "logits")


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """The layers in the pipeline plan; without a plan the modules that must not be split."""
    modules = dict(model.named_modules())
    for name in pipeline_plan(model):
        layers = modules.get(name)
        if isinstance(layers, nn.ModuleList):
            return tuple(f"{name}.{number}" for number in range(len(layers)))
    whole = undivided_classes(model)
    blocks: list[str] = []
    for name, module in modules.items():
        is_inside = any(name.startswith(f"{block}.") for block in blocks)
        if type(module).__name__ in whole and not is_inside:
            blocks.append(name)
    return tuple(blocks)


def _styles(model: nn.Module, head: str) -> tuple[dict[str, Style], str]:
    """The style of each module that `tp` shards, or the reason why it cannot."""
    plan = tensor_plan(model)
    if not plan:
        return {}, f"{type(model).__name__} has no tensor parallel plan"
    experts = [name for name, style in plan.items() if style == EXPERTS]
    plan = {
        name: style
        for name, style in plan.items()
        if not any(name == expert or name.startswith(f"{expert}.") for expert in experts)
    }
    kinds = _kinds(model, plan)
    parameters = {_starred(name) for name, _ in model.named_parameters()}
    styles: dict[str, Style] = {}
    for name, planned in plan.items():
        style = STYLES.get(planned)
        if style == "colwise_gathered" and name == head:
            style = "logits"  # the loss is computed from parts of the logits
        required = {"vocabulary": nn.Embedding, "partial": nn.Module}.get(style or "", nn.Linear)
        unfit = [kind for kind in kinds[name] if not issubclass(kind, required)]
        if planned not in STYLES or unfit or name in parameters:
            return {}, f"its plan gives {name} the style {planned}, which is not supported here"
        # A subclass may do more than a lookup, so it is replicated.
        subclassed = style == "vocabulary" and kinds[name] != {nn.Embedding}
        if style is not None and kinds[name] and not subclassed:
            styles[name] = style
    if not CUT & set(styles.values()):
        return {}, f"the plan of {type(model).__name__} shards none of its layers"
    weights = dict(model.named_parameters(remove_duplicate=False))
    is_tied = weights.get(f"{head}.weight") is input_embedding(model).weight
    if is_tied and "vocabulary" not in styles.values():
        styles.pop(head, None)
    return styles, ""


def _kinds(model: nn.Module, plan: dict[str, str]) -> dict[str, set[type]]:
    """The classes of the modules that each name of a plan matches."""
    planned = ModelShape((), Limits(), dict.fromkeys(plan, "replicated"))
    kinds: dict[str, set[type]] = {name: set() for name in plan}
    for name, module in model.named_modules():
        if planned.style_of(name):
            kinds[_starred(name)].add(type(module))
    return kinds


def _divisor(model: nn.Module, styles: dict[str, Style]) -> int:
    """The number that `tp` must divide: common to the numbers of heads and the sharded widths."""
    text = text_config(model)
    heads = [
        int(getattr(text, name, None) or 0)
        for name in ("num_attention_heads", "num_key_value_heads")
    ]
    shape = ModelShape((), Limits(), styles)
    widths = [
        module.in_features if shape.style_of(name) == "rowwise" else module.out_features
        for name, module in model.named_modules()
        if shape.style_of(name) in CUT and isinstance(module, nn.Linear)
    ]
    return gcd(*heads, *widths)


def _layers(
    model: nn.Module, blocks: tuple[str, ...], embedding: str, head: str
) -> tuple[tuple[Layer, ...], str]:
    """The layers for pipeline stages; or one layer for all, and the reason against several."""
    whole = (Layer((), 1),)
    modules = dict(model.named_modules())
    plan = [name for name in pipeline_plan(model) if name in modules]
    if not plan or not blocks:
        return whole, f"{type(model).__name__} has no pipeline plan"
    weights = dict(model.named_parameters(remove_duplicate=False))
    inner = [name for name in plan if name.startswith(f"{model.base_model_prefix}.")]
    outer = [name for name in plan if name not in inner]
    layer_list = blocks[0].rpartition(".")[0]
    if layer_list not in inner:
        return whole, f"{type(model).__name__} has no pipeline plan"
    at = inner.index(layer_list)
    front, back = tuple(inner[:at]), (*inner[at + 1 :], *outer)
    # Some models drop out embeddings in a module of its own, which has no parameters.
    extra = [name for name in front[1:] if any(True for _ in modules[name].parameters())]
    if front[:1] != (embedding,) or extra or head not in back:
        return whole, "its pipeline plan must begin with the embedding and end with the head"
    parts = (front, *((block,) for block in blocks), back)
    layers = tuple(Layer(names, _cost(model, names)) for names in parts)
    known = [name for layer in layers for name in layer.modules]
    for name in weights:
        if not any(name.startswith(f"{module}.") for module in known):
            return whole, f"its pipeline plan leaves out {name}"
    if (names := other_tie(layers, model)) is not None:
        return whole, f"{names[0]} and {names[1]} are one weight of layers between the ends"
    return layers, ""


def _cost(model: nn.Module, names: tuple[str, ...]) -> int:
    """Multiplications per token; an embedding counts one per value of a row."""
    parts = [part for name in names for part in model.get_submodule(name).modules()]
    costs = [
        part.embedding_dim if isinstance(part, nn.Embedding) else weight.numel()
        for part in parts
        for weight in part.parameters(recurse=False)
    ]
    return max(1, sum(costs))


def why_random(config: Any, fields: Sequence[str] = RANDOM_FIELDS) -> str:
    """The config field because of which a sharded pass would draw other random numbers, or ''."""
    for name, value in config.to_dict().items():
        is_random = any(part in name for part in fields)
        if name.startswith(OTHER_HEADS):
            continue
        if is_random and isinstance(value, int | float) and value:
            return f"{name}={value}: its random numbers would depend on the layout; set 0"
    return ""


def _starred(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
