"""The optimizer over local shards; its step runs no collective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from pipelines.errors import UserError
from pipelines.settings import OptimizerSettings


class OptimizerFactory(Protocol):
    """An optimizer and its learning rate schedule, the same for every shard of every layout."""

    @property
    def max_grad_norm(self) -> float | None:
        """The global norm to which gradients are clipped; None disables clipping."""

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        """Build an optimizer over named shards of parameters.

        The update of an element may depend only on that element and on the parameter's name and
        number of dims.
        """

    def schedule(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Set the hyperparameters that a built optimizer's groups have at a step, counted from 1.

        `INITIAL_LR` is the learning rate with which a group was built.
        """

    @property
    def initial_values(self) -> Tensor | None:
        """At step 0, the numbers that a script may change between steps; float64, shape (n,).

        They are part of the state. None if the schedule depends on the step alone.
        """


INITIAL_LR = "initial_lr"


def scale_rates(groups: Sequence[dict[str, Any]], rate: float) -> None:
    """Set each group's learning rate to its initial one times `rate`."""
    for group in groups:
        group["lr"] = group[INITIAL_LR] * rate


class AdamWBySettings:
    """AdamW from a run's settings, with weight decay on matrices only. See `OptimizerFactory`."""

    initial_values = None

    def __init__(self, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.max_grad_norm = settings.max_grad_norm

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        settings = self.settings
        groups: list[dict[str, Any]] = [
            {"params": [shard for _, shard in shards if shard.ndim > 1]},
            {"params": [shard for _, shard in shards if shard.ndim <= 1], "weight_decay": 0.0},
        ]
        return AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def schedule(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        scale_rates(groups, rate_of(self.settings, step))


def rate_of(settings: OptimizerSettings, step: int) -> float:
    """The learning rate of a step, counted from 1, as a fraction of the peak: linear warm-up, then
    a cosine down to `min_lr_ratio`.

    Loshchilov and Hutter, SGDR, 2017.
    """
    if step <= settings.warmup_steps:
        return step / settings.warmup_steps
    if not settings.decay_steps:
        return 1.0
    span = max(1, settings.decay_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / span)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The learning rate of a step; see `rate_of`."""
    return settings.lr * rate_of(settings, step)


def state_templates(
    optimizer_factory: OptimizerFactory, num_dims: Mapping[str, int], dtype: torch.dtype
) -> dict[str, dict[str, Tensor]]:
    """The optimizer state of parameters of these names and numbers of dims.

    Steps small parameters of shape (2, 3, ...) once. State of the parameter's shape holds a value
    for each element; state of shape () holds one for the parameter. Raises `UserError` for an
    optimizer with other state.
    """
    small = {
        name: torch.zeros(tuple(range(2, 2 + ndim)), dtype=dtype) for name, ndim in num_dims.items()
    }
    for weight in small.values():
        weight.grad = torch.zeros_like(weight)
    optimizer = optimizer_factory.build(list(small.items()))
    optimizer.step()
    templates = {
        name: {key: value for key, value in optimizer.state[weight].items() if value is not None}
        for name, weight in small.items()
    }
    for name, template in templates.items():
        for key, value in template.items():
            _refuse_other_state(optimizer, name, key, value, small[name].shape)
    return templates


def _refuse_other_state(
    optimizer: Optimizer, name: str, key: str, value: object, shape: torch.Size
) -> None:
    kind = type(optimizer).__name__
    if not isinstance(value, Tensor):
        raise UserError(
            f"optimizer {kind}: keeps {key} of {name} as {type(value).__name__}: optimizer state "
            "must be tensors"
        )
    if value.shape not in (shape, ()):
        raise UserError(
            f"optimizer {kind}: keeps {key} of shape {tuple(value.shape)} for a parameter of "
            f"shape {tuple(shape)}: only state of the parameter's shape or of shape () can be "
            "sharded"
        )


class LocalOptimizer:
    """Steps the shards of one rank as plain tensors.

    With DTensors, `step()` would run collectives for parameters that an axis replicates. The
    plain tensors share memory with the DTensors.
    """

    def __init__(
        self,
        optimizer_factory: OptimizerFactory,
        shards: Mapping[str, Tensor],
        state: Mapping[str, dict[str, Tensor]],
    ) -> None:
        """Take the local shards, and the state of each by the keys of `state_templates`."""
        self.shards = dict(shards)
        self._factory = optimizer_factory
        self.optimizer = optimizer_factory.build(list(shards.items()))
        for group in self.optimizer.param_groups:
            group.setdefault(INITIAL_LR, float(group["lr"]))
        for name, shard in shards.items():
            self.optimizer.state[shard] = dict(state[name])

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The live optimizer state of each shard."""
        return {name: self.optimizer.state[shard] for name, shard in self.shards.items()}

    def schedule(self, step: int) -> float:
        """Set the hyperparameters of a step, counted from 1.

        Returns the first group's learning rate, or one that is not finite if there is any.
        """
        groups = self.optimizer.param_groups
        self._factory.schedule(step, groups)
        rates = [float(group["lr"]) for group in groups]
        return next((rate for rate in rates if not math.isfinite(rate)), rates[0])

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Step with these gradients. A shard without a gradient does not change."""
        for name, gradient in gradients.items():
            self.shards[name].grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
