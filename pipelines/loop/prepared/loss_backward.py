"""`loss.backward()` of a script, which in the body of a step is `step.backward(loss)`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from torch import Tensor

_torch_backward: Callable[..., None] = Tensor.backward


class BackwardStep(Protocol):
    """The step whose body runs."""

    def backward(self, loss: Tensor) -> None: ...

    def refuse_other_backward(self) -> NoReturn: ...


class _Entered(threading.local):
    step: BackwardStep | None = None


_entered = _Entered()


def honour_backward() -> None:
    """Let `loss.backward()` be that of the step whose body runs on the calling thread."""
    Tensor.backward = _backward  # type: ignore[method-assign]


def set_entered(step: BackwardStep | None) -> None:
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
        step.refuse_other_backward()
    else:
        step.backward(loss)
