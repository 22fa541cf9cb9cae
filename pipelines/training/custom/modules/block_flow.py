"""Shapes and dtypes of the tensors between the blocks of a custom pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipelines.settings.recipe import Recipe
from pipelines.training.custom.modules.custom_module import build_on_host, build_shapes
from pipelines.training.custom.modules.custom_pipeline import UnfitForPipeline
from pipelines.training.workload.state import in_stored_dtype
from pipelines.training.workload.workload import Layer


def flow_of(recipe: Recipe, layers: Sequence[Layer], inputs: Tensor) -> tuple[Tensor, ...]:
    """The input of each layer for a microbatch, and the last output, as meta tensors.

    Raises `UnfitForPipeline`.
    """
    model, seed = recipe.model, recipe.settings.seed
    try:
        module = build_shapes(model, seed).to("meta")
        flow = run_layers(in_dtypes(module, recipe), layers, inputs.to("meta"))
    except (RuntimeError, NotImplementedError):  # some modules read values of tensors
        flow = run_layers(in_dtypes(build_on_host(model, seed), recipe), layers, inputs)
    return tuple(hidden.detach().to("meta").requires_grad_(hidden.requires_grad) for hidden in flow)


def run_layers(module: nn.Module, layers: Sequence[Layer], hidden: Tensor) -> list[Tensor]:
    """Run a whole module layer by layer; returns each layer's input and the last output.

    Raises `UnfitForPipeline`.
    """
    flow = [hidden]
    for layer in layers:
        for name in layer.modules:
            hidden = module.get_submodule(name)(hidden)
            if not isinstance(hidden, Tensor):
                raise UnfitForPipeline(
                    f"{name} of the recipe's pipeline returns {type(hidden).__name__}: each block "
                    "of a pipeline must return one tensor"
                )
        flow.append(hidden)
    return flow


def in_dtypes(module: nn.Module, recipe: Recipe) -> nn.Module:
    """The module with parameters in the dtype of computation and buffers in that of storage."""
    in_stored_dtype(module, recipe.settings)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, recipe.settings.dtype))
    return module
