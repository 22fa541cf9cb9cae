"""From which distribution `transformers` draws a parameter, found out without drawing it.

The model's own `_init_weights` runs on the meta device, where random operations cost nothing, and
each operation on the parameter is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipelines.hugging_face.building import initialise_upwards
from pipelines.training.initial_values import Constant, Distribution, Normal, Uniform

aten = torch.ops.aten


def _uniform(low: float = 0.0, high: float = 1.0) -> Uniform:
    return Uniform(low, high)


def _normal(mean: float = 0.0, std: float = 1.0) -> Normal:
    return Normal(mean, std)


KNOWN: dict[Any, Callable[..., Distribution]] = {
    aten.normal_.default: _normal,
    aten.uniform_.default: _uniform,
    aten.fill_.Scalar: Constant,
    aten.zero_.default: lambda: Constant(0.0),
}
"""What overwrites a whole tensor, and with which values."""
ALIASES = (aten.detach.default, aten.alias.default)


class _Recording(TorchDispatchMode):
    """Notes what is done to one meta tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self.distribution: Distribution | None = None
        self.is_known = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = {k: v for k, v in (kwargs or {}).items() if k != "generator"}
        if any(self._shares(value) for value in (*args, *options.values())):
            if func in KNOWN and self._is_whole(args[0]):
                self.distribution = KNOWN[func](*args[1:], **options)
                self.is_known = True
            elif func not in ALIASES:
                self.is_known = False
        return func(*args, **(kwargs or {}))

    def _shares(self, value: Any) -> bool:
        """Whether a value lies in the tensor's memory."""
        if not isinstance(value, Tensor):
            return False
        return value.untyped_storage()._cdata == self._tensor.untyped_storage()._cdata

    def _is_whole(self, value: Any) -> bool:
        return self._shares(value) and value.numel() == self._tensor.numel()


@cache
def distribution(model: nn.Module, name: str) -> Distribution | None:
    """That of a parameter or buffer of a model on the meta device; None if it is not drawn in one
    operation from a known distribution."""
    owner, _, key = name.rpartition(".")
    holder = model.get_submodule(owner)
    tensor = holder._parameters.get(key)
    if tensor is None:
        return None
    recording = _Recording(tensor)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), recording:
        initialise_upwards(model, owner)
    return recording.distribution if recording.is_known else None
