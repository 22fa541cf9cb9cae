"""The functions of torch that draw random numbers for the elements of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ATTENTION = functional.scaled_dot_product_attention
OF_ELEMENTS: set[Callable[..., Any]] = {
    ATTENTION,
    functional.alpha_dropout,
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.feature_alpha_dropout,
    torch.bernoulli,
    torch.dropout,
    torch.rand_like,
    torch.randn_like,
}
"""Functions that draw for the elements of a tensor."""
FILLS: set[Callable[..., Any]] = {
    Tensor.bernoulli_,
    Tensor.exponential_,
    Tensor.normal_,
    Tensor.uniform_,
}
"""Methods that fill a tensor with draws."""


def first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The tensor whose elements a call draws for."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def has_dropout(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of the attention draws."""
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p"))
