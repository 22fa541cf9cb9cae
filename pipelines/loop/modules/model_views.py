"""A prepared model with its own class."""

from __future__ import annotations

from torch import nn

OWN_PREFIX = "_elastic"
"""The attributes that the run itself gives to a model begin with this."""
CALLED = f"{OWN_PREFIX}_called"
OWN_CLASS = f"{OWN_PREFIX}_own_class"
"""The attribute of a prepared model's class that names the class which the model had."""


def plain(model: nn.Module) -> nn.Module:
    """A view of a model that was prepared, with its own class; it shares all tensors."""
    own: type[nn.Module] | None = getattr(type(model), OWN_CLASS, None)
    if own is None:
        return model
    view: nn.Module = object.__new__(own)
    own_attributes = {k: v for k, v in vars(model).items() if not k.startswith(OWN_PREFIX)}
    view.__dict__.update(own_attributes)
    return view
