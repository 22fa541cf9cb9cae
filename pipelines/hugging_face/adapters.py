"""Low-rank adapters (LoRA) of `peft`: insertion, initial values, and names in adapter files."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pipelines.data.transformers_library import library
from pipelines.errors import UserError
from pipelines.hugging_face.anatomy import Anatomy
from pipelines.settings import LoraSettings
from pipelines.training.workload.initial_values import Constant, Distribution, kaiming_uniform

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


def with_adapters(anatomy: Anatomy) -> Anatomy:
    """The anatomy with `tp` and `pp` refused: the plans of `transformers` do not cover adapters."""
    limits = anatomy.shape.limits
    added = tuple((axis, "adapters train over dp and fsdp alone") for axis in ("tp", "pp"))
    known = tuple(pair for pair in limits.refused if pair[0] not in ("tp", "pp"))
    limits = replace(limits, tp_divides=1, refused=(*known, *added))
    shape = replace(anatomy.shape, limits=limits, styles={})
    return replace(anatomy, shape=shape, is_head_cut=False)
