"""All uses of private names of `transformers`, each with the reason why no public name does it."""

from __future__ import annotations

from typing import Any

from torch import nn


def undivided_classes(model: nn.Module) -> frozenset[str]:
    """The names of the classes whose modules must not be split; no public name has them."""
    names: Any = getattr(model, "_no_split_modules", None)
    return frozenset(names or ())


def initialises(module: nn.Module) -> bool:
    """Whether a module is a model that initialises the modules below it; see `initialise`."""
    return hasattr(module, "_init_weights")


def initialise(model: nn.Module, part: nn.Module) -> None:
    """Initialise a module without its children, as its model does.

    The public `init_weights` initialises the whole model, which may not fit into memory.
    """
    initialise_part: Any = model._init_weights
    initialise_part(part)
