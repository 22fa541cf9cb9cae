"""BatchNorm whose statistics do not depend on how microbatches are merged into passes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from actors.distributed.torch_private import is_recomputed

PARAMETERS = inspect.signature(functional.batch_norm)


class MicrobatchStatistics(TorchFunctionMode):
    """Normalizes each microbatch of a pass by its own statistics, as "ghost batches" (Hoffer et
    al., 2017, arXiv:1705.08741), where the microbatches divide dim 0 of the input.

    The running statistics become the mean of those that single microbatches would leave.
    """

    def __init__(self, num_microbatches: int) -> None:
        super().__init__()
        self._num_microbatches = num_microbatches

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.batch_norm:
            given = PARAMETERS.bind(*args, **kwargs)
            given.apply_defaults()
            named = dict(given.arguments)
            is_divided = named["input"].shape[0] % self._num_microbatches == 0
            if named["training"] and is_divided and not is_recomputed():
                return self._normalize(**named)
        return function(*args, **kwargs)

    def _normalize(
        self, input: Tensor, running_mean: Any, running_var: Any, **others: Any
    ) -> Tensor:
        running = [value for value in (running_mean, running_var) if value is not None]
        sums = [torch.zeros_like(value) for value in running]
        normalized = []
        for part in input.chunk(self._num_microbatches):
            own = [value.clone() for value in running]
            normalized.append(functional.batch_norm(part, *(own or (None, None)), **others))
            for total, value in zip(sums, own, strict=True):
                total += value
        for value, total in zip(running, sums, strict=True):
            value.copy_(total / self._num_microbatches)
        return torch.cat(normalized)
