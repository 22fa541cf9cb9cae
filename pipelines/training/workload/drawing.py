"""The functions of torch that draw random numbers for the elements of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

ATTENTION = functional.scaled_dot_product_attention
DROPOUTS: set[Callable[..., Any]] = {functional.dropout, torch.dropout}
"""Dropout of single elements."""
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


MASKS: set[Callable[..., Any]] = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    torch.dropout,
}
"""Functions that multiply a tensor with what they draw."""
NEW: set[Callable[..., Any]] = {torch.rand, torch.randn}
"""Functions that make a tensor of draws."""


def drawn_shape(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int, ...] | None:
    """The shape of the tensor that a call draws for, from the default generator; None: it does not.

    For the attention it is that of the queries.
    """
    if kwargs.get("generator") is not None:
        return None
    if function in OF_ELEMENTS and draws(function, args, kwargs):
        return tuple(first_tensor(args, kwargs).shape)
    if function in FILLS:
        return tuple(args[0].shape)
    if function in NEW:
        options = {key: value for key, value in kwargs.items() if key == "size"}
        return tuple(torch.empty(*args, **options, device="meta").shape)
    return None


def draws(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of one of `OF_ELEMENTS` draws; a dropout of nothing returns its input."""
    if function is ATTENTION:
        return has_dropout(args, kwargs)
    return not (function in MASKS and not DropoutCall(*args, **kwargs).drops)


class DropoutCall(NamedTuple):
    """The arguments of one of `MASKS`."""

    input: Tensor
    p: float = 0.5
    training: bool = True
    inplace: bool = False
    train: bool = True

    @property
    def drops(self) -> bool:
        """Whether it drops anything: its probability is not 0, and it trains."""
        return bool(self.p and self.training and self.train)


def is_in_place(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of any dropout changes its input."""
    return bool(kwargs.get("inplace")) or any(args[3:])


def first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The tensor whose elements a call draws for."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def has_dropout(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of the attention draws."""
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p"))
