"""What flows between the blocks of a user's own pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipelines.settings.recipe import Recipe
from pipelines.training.custom.custom_module import build_for_real, shapes_alone
from pipelines.training.custom.custom_pipeline import Unfit
from pipelines.training.workload.state import stored_dtype
from pipelines.training.workload.workload import Layer


def flow_of(recipe: Recipe, layers: Sequence[Layer], inputs: Tensor) -> tuple[Tensor, ...]:
    """What a microbatch brings into each layer, then out of the last, on the meta device. Raises
    `Unfit`."""
    model, seed = recipe.model, recipe.settings.seed
    try:
        module = shapes_alone(model, seed).to("meta")
        flow = through(in_dtypes(module, recipe), layers, inputs.to("meta"))
    except (RuntimeError, NotImplementedError):  # some modules have to read values
        flow = through(in_dtypes(build_for_real(model, seed), recipe), layers, inputs)
    return tuple(one.detach().to("meta").requires_grad_(one.requires_grad) for one in flow)


def through(module: nn.Module, layers: Sequence[Layer], hidden: Tensor) -> list[Tensor]:
    """What comes into each layer of a whole module, and out of the last. Raises `Unfit`."""
    flow = [hidden]
    for layer in layers:
        for name in layer.modules:
            hidden = module.get_submodule(name)(hidden)
            if not isinstance(hidden, Tensor):
                raise Unfit(
                    f"{name} of the recipe's pipeline gives {type(hidden).__name__}: a pipeline "
                    "passes on one tensor"
                )
        flow.append(hidden)
    return flow


def in_dtypes(module: nn.Module, recipe: Recipe) -> nn.Module:
    """Parameters in what they are computed with, buffers in what they are kept in."""
    module.to(stored_dtype(recipe.settings))
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, recipe.settings.dtype))
    return module
