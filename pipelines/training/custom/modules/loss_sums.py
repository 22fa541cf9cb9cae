"""The sums of a recipe's losses, in any form that its functions may return."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.errors import UserError
from pipelines.settings.recipe import Losses
from pipelines.training.attention.cut_sequences import NO_PAIR, over_ring
from pipelines.training.custom.modules.custom_pipeline import CustomBatch
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.workload import LossSums, at_least_float32


def counted(
    loss: Callable[[nn.Module, Any], Losses],
    module: nn.Module,
    fed: CustomBatch,
    parallel: ParallelGroups,
) -> LossSums:
    """The sums of a recipe's function on a microbatch; zero on a padding microbatch."""
    with over_ring(fed.length, parallel) if fed.length else nullcontext():
        losses = loss(module, fed.value)
    if fed.length and not isinstance(losses, tuple):
        raise UserError(NO_PAIR)
    sums = loss_sums_of(losses, fed.num_held)
    if fed.num_samples:
        return sums
    return LossSums(sums.loss * 0.0, torch.zeros_like(sums.num_tokens))


def loss_sums_of(losses: Losses, num_samples: int) -> LossSums:
    """The sum and the count of a microbatch's losses, from either form that a loss may return.

    Raises `UserError` for any other form.
    """
    match losses:
        case Tensor() if losses.shape == (num_samples,) and num_samples > 1:
            total = at_least_float32(losses).sum()
            return LossSums(total, torch.tensor(num_samples, device=total.device))
        case Tensor() if losses.numel() == 1:
            loss = at_least_float32(losses if losses.dim() == 0 else losses.reshape(()))
            return LossSums(loss * num_samples, torch.tensor(num_samples, device=loss.device))
        case (Tensor() as total, count) if total.numel() == 1:
            total = at_least_float32(total.reshape(()))
            return LossSums(total, torch.as_tensor(count, device=total.device).detach().reshape(()))
    returned = (
        f"a tensor of shape {tuple(losses.shape)}"
        if isinstance(losses, Tensor)
        else (type(losses).__name__)
    )
    raise UserError(
        f"the recipe's loss returned {returned}: return one loss for each sample, a scalar, their "
        "mean, or a pair (sum, count), e.g. over tokens"
    )
