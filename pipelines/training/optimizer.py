"""AdamW over local shards: stepping it is local and cheap, and runs no collective."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from pipelines.settings import OptimizerSettings

SCALAR = ()


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The learning rate of a step, counted from 1: linear warm-up, then a cosine down to
    `min_lr_ratio` of the peak.

    Loshchilov and Hutter, SGDR, 2017.
    """
    if step <= settings.warmup_steps:
        return settings.lr * (step / settings.warmup_steps)
    if not settings.decay_steps:
        return settings.lr
    span = max(1, settings.decay_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / span)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine)


def state_template(settings: OptimizerSettings, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the optimizer keeps for a parameter: found by stepping one of shape (2, 3) once.

    A value of that shape is kept for each element of a parameter, one of shape () once.
    """
    weight = torch.zeros(2, 3, dtype=dtype)
    weight.grad = torch.zeros_like(weight)
    optimizer = _adamw(settings, [weight], [])
    optimizer.step()
    return dict(optimizer.state[weight])


class LocalOptimizer:
    """Steps the shards that one rank holds, as plain tensors.

    A DTensor would run collectives inside `step()` for parameters that an axis replicates;
    what is stepped here shares its memory, and knows nothing of meshes.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        shards: Mapping[str, Tensor],
        state: Mapping[str, dict[str, Tensor]],
    ) -> None:
        """Take the local shards, and for each its state by the keys of `state_template`."""
        self.settings = settings
        self.shards = dict(shards)
        matrices = [shard for shard in shards.values() if shard.ndim > 1]
        vectors = [shard for shard in shards.values() if shard.ndim <= 1]
        self.optimizer = _adamw(settings, matrices, vectors)
        for name, shard in shards.items():
            self.optimizer.state[shard] = dict(state[name])

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The state of each shard, as it is trained."""
        return {name: self.optimizer.state[shard] for name, shard in self.shards.items()}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """One step with these gradients; a shard without one stays as it is."""
        for name, gradient in gradients.items():
            self.shards[name].grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _adamw(settings: OptimizerSettings, matrices: list[Tensor], vectors: list[Tensor]) -> Optimizer:
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)
