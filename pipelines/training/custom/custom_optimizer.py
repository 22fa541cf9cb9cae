"""The optimizer of a custom recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pipelines.settings.recipe import Recipe
from pipelines.training.workload.clipping import Clipping
from pipelines.training.workload.optimizer import scale_rates


class CustomOptimizerFactory:
    """The optimizer of a recipe; see `pipelines.training.workload.optimizer.OptimizerFactory`."""

    script_state: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.clipping = Clipping(recipe.max_grad_norm, recipe.max_grad_value)

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        return self.recipe.optimizer(shards)

    def schedule(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        scale_rates(groups, float(self.recipe.schedule(step)))
