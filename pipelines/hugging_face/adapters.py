"""Low-rank adapters (LoRA) of `peft`: insertion, initial values, and names in adapter files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pipelines.data.transformers_library import library
from pipelines.errors import UserError
from pipelines.hugging_face.anatomy import Anatomy
from pipelines.settings import LoraSettings
from pipelines.training.workload.initial_values import Constant, Distribution, kaiming_uniform
from pipelines.training.workload.workload import Layer, starred

BASE = ".base_layer."
ADAPTER = ".default."
"""Name parts that `peft` inserts: for the base layer of an adapter, and for the adapter."""
ALL = "all-linear"


def adapter_config(lora: LoraSettings, folder: str | None = None) -> Any:
    """The `peft` config of adapters to the model in this folder."""
    return library("peft").LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets) or ALL,
        base_model_name_or_path=folder,
        task_type="CAUSAL_LM",
    )


def add_adapters(model: nn.Module, lora: LoraSettings) -> None:
    """Insert adapters into a model on the meta device and freeze all other parameters.

    Raises `UserError`.
    """
    peft = library("peft")
    try:
        with torch.device("meta"):
            peft.inject_adapter_in_model(adapter_config(lora), model)
    except ValueError as error:
        raise UserError(f"lora.targets={','.join(lora.targets)}: {error}") from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of an adapter."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """The name of a parameter in the model without adapters."""
    return name.replace(BASE, ".")


def file_name(name: str) -> str:
    """The name of an adapter's parameter in a file of `peft`."""
    return f"base_model.model.{name.replace(ADAPTER, '.')}"


def adapter_distribution(name: str, shape: tuple[int, ...]) -> Distribution:
    """The initial distribution of an adapter's parameter, as in `peft`: B is 0, so B x A is 0."""
    return Constant(0.0) if ".lora_B." in name else kaiming_uniform(shape[1], math.sqrt(5))


def with_adapters(anatomy: Anatomy, adapted: nn.Module) -> Anatomy:
    """The anatomy of a model into which adapters were inserted.

    An adapter adds `B A x` to the output of its base layer. If `tp` shards that output, it shards
    the rows of B, and A is replicated; if it shards the input `x`, it shards the columns of A, and
    B is replicated. A layer without adapters joins its neighbour, because a pipeline stage without
    trained parameters has no optimizer.
    """
    shape, styles = anatomy.shape, dict(anatomy.shape.styles)
    refused = shape.limits.refused
    for name, module in adapted.named_modules():
        base, _, last = name.rpartition(".")
        style = shape.style_of(base) if last == BASE.strip(".") else None
        if style is None:
            continue
        if style == "colwise_gathered":
            refused = (*refused, ("tp", f"{base} gathers its output, where adapters cannot add"))
        elif not isinstance(module, nn.Linear):
            refused = (*refused, ("tp", f"the adapter of {base} is not one of a linear layer"))
        sharded = "lora_A" if style == "rowwise" else "lora_B"
        styles[starred(name)] = style
        styles[starred(f"{base}.{sharded}{ADAPTER.rstrip('.')}")] = style
    trained = [name for name, _ in adapted.named_parameters() if is_adapter(name)]
    layers = _joined(shape.layers, trained)
    limits = replace(shape.limits, refused=refused, num_layers=len(layers))
    return replace(anatomy, shape=replace(shape, layers=layers, limits=limits, styles=styles))


def _joined(layers: Sequence[Layer], trained: Sequence[str]) -> tuple[Layer, ...]:
    """The layers, those without trained parameters joined to the one before or else behind."""
    joined: list[Layer] = []
    for layer in layers:
        if joined and not (_has_any(layer, trained) and _has_any(joined[-1], trained)):
            before = joined.pop()
            joined.append(Layer((*before.modules, *layer.modules), before.cost + layer.cost))
        else:
            joined.append(layer)
    return tuple(joined)


def _has_any(layer: Layer, parameters: Sequence[str]) -> bool:
    """Whether a layer has any of these parameters; one without modules is the whole model."""
    prefixes = tuple(f"{module}." for module in layer.modules) or ("",)
    return any(name.startswith(prefixes) for name in parameters)
