"""The optimizer of a custom recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipelines.settings.recipe import Recipe
from pipelines.training.workload.clipping import Clipping
from pipelines.training.workload.optimizer import scale_rates


class CustomOptimizerFactory:
    """The optimizer of a recipe; see `pipelines.training.workload.optimizer.OptimizerFactory`."""

    script_state: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(self, recipe: Recipe, module: Callable[[], nn.Module]) -> None:
        """`module` builds the recipe's module, with or without values."""
        self.recipe = recipe
        self._module = module
        self.clipping = Clipping(recipe.max_grad_norm, recipe.max_grad_value)

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        for name, shard in shards:
            vars(shard).update(self._attributes.get(name, {}))
        return self.recipe.optimizer(shards)

    def schedule(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        scale_rates(groups, float(self.recipe.schedule(step)))

    @cached_property
    def _attributes(self) -> dict[str, dict[str, Any]]:
        """What the recipe's model has noted on its parameters, such as which do not decay."""
        return {name: vars(parameter) for name, parameter in self._module().named_parameters()}
