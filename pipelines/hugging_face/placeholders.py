"""Modules in the place of layers that other pipeline stages hold, and what a model draws beside."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipelines.errors import first_line
from pipelines.hugging_face.building import text_config
from pipelines.training.workload.drawing import drawn_shape

LENGTH = 8
"""Tokens of the trial's sequence."""


class Placeholder(nn.Module):
    """Takes the place of a module that another pipeline stage holds; returns its first input."""

    def forward(self, hidden: Any, *inputs: Any, **options: Any) -> Any:
        return hidden


def placeholder_for(module: nn.Module) -> nn.Module:
    """A placeholder with the plain attributes that a loop over layers may read."""
    placeholder = Placeholder()
    plain = {k: v for k, v in vars(module).items() if isinstance(v, str | int | float | None)}
    public = {k: v for k, v in plain.items() if not k.startswith("_") and k != "training"}
    vars(placeholder).update(public)
    return placeholder


class FirstDraw(TorchFunctionMode):
    """Notes the name of the first function that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.name and drawn_shape(function, args, kwargs):
            self.name = function.__name__
        return function(*args, **kwargs)


@torch.no_grad()
def why_not_in_stages(model: nn.Module, layers: Iterable[str], draws: bool) -> str:
    """The reason why each stage would repeat what the model does beside the modules `layers`, or
    ''.

    A trial runs what is left of the model without them: it must return the hidden states that it
    gets, and, if the model `draws` random numbers, draw none. The model is on the meta device, but
    has its other buffers.
    """
    rest = deepcopy(model).train()
    for name in layers:
        owner, _, child = name.rpartition(".")
        holder = rest.get_submodule(owner)
        setattr(holder, child, placeholder_for(holder.get_submodule(child)))
    base: Any = rest.base_model
    name = type(model).__name__
    hidden = torch.linspace(-1, 1, LENGTH * text_config(model).hidden_size).view(1, LENGTH, -1)
    try:
        with torch.random.fork_rng(devices=[]), FirstDraw() as draw:
            rest(inputs_embeds=hidden, use_cache=False)
            flowing = base(inputs_embeds=hidden, use_cache=False).last_hidden_state
    except Exception as error:  # a model without its layers may fail in any way
        reason = first_line(error)
        return f"a trial without its layers failed: {type(error).__name__}: {reason}"
    if draws and draw.name:
        return f"{name} draws random numbers outside of its layers"
    if not torch.equal(flowing, hidden):
        return f"{name} changes hidden states outside of its layers, which each stage would repeat"
    return ""
