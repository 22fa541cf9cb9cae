"""The load-balancing loss that a model's routers add to the loss of each microbatch."""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipelines.errors import UserError

OPTION = "output_router_logits"
"""The config field, and the option of a model's forward, that requests the loss."""
COEFFICIENT = "router_aux_loss_coef"


class RoutedLogits(NamedTuple):
    """The logits of a pass, and the load-balancing loss of its routers times its coefficient."""

    logits: Tensor
    imbalance: Tensor


def has_router_loss(model: nn.Module) -> bool:
    """Whether the model's config requests the load-balancing loss of its routers."""
    config: Any = model.config
    return bool(getattr(config.get_text_config(), OPTION, False))


def refuse_unknown_router_loss(model: nn.Module) -> None:
    """Raise `UserError` if the config requests a loss that the model does not compute."""
    computes = OPTION in signature(type(model).forward).parameters and hasattr(model, COEFFICIENT)
    if has_router_loss(model) and not computes:
        raise UserError(
            f"{type(model).__name__} computes no load-balancing loss of routers: "
            f"--set model.config.{OPTION}=false"
        )


def routed_logits(model: nn.Module, output: Any) -> RoutedLogits:
    """What the loss needs of a model's output."""
    coefficient: Any = getattr(model, COEFFICIENT)
    if output.aux_loss is None:
        raise UserError(
            f"{type(model).__name__} has no routers whose loss could be computed: "
            f"--set model.config.{OPTION}=false"
        )
    return RoutedLogits(output.logits, coefficient * output.aux_loss)
