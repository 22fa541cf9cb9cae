"""The calls of a model in a script's body, recorded so that a trial can repeat them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipelines.training.workload.trees import mapped, tensors_in

Convert = Callable[[Tensor], Tensor]


class ModuleCall(NamedTuple):
    """A call of a model or of one of its parts, by its name in the model."""

    name: str
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]


class BodyTrial(NamedTuple):
    """What the body of a script's step has done with its model when it was tried out."""

    calls: Sequence[ModuleCall] = ()
    """Without any, the body was not tried out."""
    trained: frozenset[str] = frozenset()
    """The parameters that have got a gradient."""
    why_no_cp: str | None = "the body of the step was not tried out before the run"
    """Why `cp` cannot cut the sequences of the batches."""

    def repeat(self, module: nn.Module, convert: Convert) -> Tensor:
        """Repeat the calls with another copy of the model, whose tensors `convert` makes.

        Returns a number that depends on each element of the outputs, in place of the loss.
        """
        total = torch.zeros(())
        for call in self.calls:
            inputs, keywords = mapped(convert, (call.inputs, call.keywords))
            part = module.get_submodule(call.name)
            for output in tensors_in(part(*inputs, **keywords)):
                if output.requires_grad or (output.is_meta and output.is_floating_point()):
                    total = total.to(output.device) + (output * _weights_of(output)).sum()
        return total


class CallRecorder(AbstractContextManager["CallRecorder"]):
    """Records the calls of a model's parts that no other part makes, with copies of their inputs,
    until `stop`."""

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[ModuleCall] = []
        self._depth = 0
        self._is_recording = True
        self._hooks = [
            hook
            for name, part in module.named_modules()
            for hook in (
                part.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                part.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def stop(self) -> None:
        self._is_recording = False

    def __exit__(self, *ignored: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _enter(self, name: str, part: nn.Module, inputs: Any, keywords: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth == 1 and self._is_recording:
            copied = mapped(lambda tensor: tensor.detach().clone(), (inputs, keywords))
            self.calls.append(ModuleCall(name, *copied))

    def _leave(self, part: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1


def _weights_of(output: Tensor) -> Tensor:
    """Numbers that differ from element to element, as those of a real loss's gradient do."""
    numbers = torch.arange(1, output.numel() + 1, device=output.device)
    return numbers.to(torch.float64).sin().to(output.dtype).view_as(output)
