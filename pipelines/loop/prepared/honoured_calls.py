"""Calls of torch that in the body of a step are the run's: `loss.backward()`, the clipping of all
gradients, and the look at a loss."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from pipelines.settings.user_code import is_users
from pipelines.training.workload.clipping import Clipping

_torch_backward: Callable[..., None] = Tensor.backward
_torch_reads: dict[str, Callable[..., Any]] = {
    name: getattr(Tensor, name) for name in ("item", "tolist", "__float__")
}
_torch_clip_norm: Callable[..., Tensor] = clip_grad.clip_grad_norm_
_torch_clip_value: Callable[..., None] = clip_grad.clip_grad_value_


class HonouringStep(Protocol):
    """The step whose body runs."""

    def backward(self, loss: Tensor) -> None: ...

    def note_read(self, tensor: Tensor) -> None: ...

    def misused(self, how: str) -> Exception: ...

    def clip(self, model: nn.Module, clipping: Clipping) -> Tensor: ...


class _Entered(threading.local):
    step: HonouringStep | None = None


_entered = _Entered()


def honour_calls() -> None:
    """Let these calls be those of the step whose body runs on the calling thread, also where the
    user's modules have imported the functions by name."""
    Tensor.backward = _backward  # type: ignore[method-assign]
    for name, torchs in _torch_reads.items():
        setattr(Tensor, name, _reading(torchs))
    users = [
        module
        for name, module in [*sys.modules.items()]
        if name == "__main__" or is_users(getattr(module, "__file__", None) or "")
    ]
    for module in (torch.nn.utils, clip_grad, *users):
        for name, value in [*vars(module).items()]:
            if value is _torch_clip_norm:
                setattr(module, name, _clip_norm)
            elif value is _torch_clip_value:
                setattr(module, name, _clip_value)


def set_entered(step: HonouringStep | None) -> None:
    """From now on the calling thread runs the body of this step, or of none."""
    _entered.step = step


def run_backward(loss: Tensor) -> None:
    """The backward pass itself. Torch looks the method up again for tensors of other classes, and
    within a `TorchFunctionMode`: there it is torch's own, too."""
    step, _entered.step = _entered.step, None
    try:
        _torch_backward(loss)
    finally:
        _entered.step = step


def _backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """With `inputs` it is not the model's: the gradients of these tensors alone change."""
    step = _entered.step
    if step is None or inputs is not None:
        _torch_backward(loss, gradient, retain_graph, create_graph, inputs)
    elif gradient is not None or create_graph:
        raise step.misused(
            "loss.backward(gradient, create_graph=...): a microbatch has one backward pass, of a "
            "loss that is one number; for gradients of gradients use torch.autograd.grad"
        )
    else:
        step.backward(loss)


def _reading(torchs: Callable[..., Any]) -> Callable[[Tensor], Any]:
    def read(tensor: Tensor) -> Any:
        if _entered.step is not None and tensor.requires_grad:
            _entered.step.note_read(tensor)
        return torchs(tensor)

    return read


def _clip_norm(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips all gradients of a model, once they are those of the whole step. Returns a tensor that
    then holds their norm."""
    step, model = _entered.step, _model_of(parameters)
    if step is None or model is None:
        return _torch_clip_norm(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    if norm_type != 2.0:
        raise step.misused("clip_grad_norm_: the run clips by the 2-norm: leave out norm_type")
    return step.clip(model, Clipping(max_norm=float(max_norm)))


def _clip_value(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
    step, model = _entered.step, _model_of(parameters)
    if step is None or model is None:
        _torch_clip_value(parameters, clip_value, foreach)
    else:
        step.clip(model, Clipping(max_value=float(clip_value)))


def _model_of(parameters: Any) -> nn.Module | None:
    """The model of which these are the `parameters()`, not iterated yet; None for others."""
    if getattr(parameters, "gi_code", None) is not nn.Module.parameters.__code__:
        return None
    model: nn.Module = parameters.gi_frame.f_locals["self"]
    return model
