"""What operations keep for backward on a GPU, where that differs from a CPU.

A memory trial runs on tensors of the CPU without values. There `rms_norm` consists of single
operations, which keep several tensors in float32, and `dropout` keeps a mask in the dtype of its
input. The kernels of GPUs keep the input and one number a row, and a mask of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

NORMS = (functional.rms_norm, torch.rms_norm)
DROPOUTS = (functional.dropout, torch.dropout)


class KeptAsOnGpu(TorchFunctionMode):
    """Replaces these operations by ones that keep what kernels of GPUs keep; values are lost."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NORMS:
            return _norm(*args, **kwargs)
        if func in DROPOUTS:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def keep_as_on_gpu(blocks: Iterable[nn.Module]) -> None:
    """Use `KeptAsOnGpu` in these modules, also when backward computes one again: no mode of the
    forward is active there."""
    for block in blocks:
        block.forward = partial(_forward_as_on_gpu, block.forward)


def _forward_as_on_gpu(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with KeptAsOnGpu():
        return forward(*args, **kwargs)


def _norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return functional.rms_norm(input, normalized_shape, weight, eps)  # no kernel takes both
    normed: Tensor = _KeepsInput.apply(input, weight, len(normalized_shape))
    return normed


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **others: bool
) -> Tensor:
    if not (others.get("train", training) and 0 < p < 1):
        return functional.dropout(input, p, training=False)
    return torch.native_dropout(input, p, True)[0]


class _KeepsInput(torch.autograd.Function):
    """A norm that keeps its input, its weight, and a number in float32 for each row."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        rows = input.shape[: input.dim() - num_dims]
        ctx.save_for_backward(input, weight, input.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        of_weight = None if weight is None else torch.empty_like(weight)
        return torch.empty_like(input), of_weight, None
