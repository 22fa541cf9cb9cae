"""Random draws of a merged pass that equal those of a pass for each of its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipelines.training.workload.seeds import default_generator, forward_seed

ATTENTION = functional.scaled_dot_product_attention
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


class MicrobatchDraws(TorchFunctionMode):
    """Calls a function that draws once for each microbatch of a pass: with the microbatch's slice
    of dim 0, and with the generator of a pass that has this microbatch alone.

    So the draws are exactly those of single microbatches, on any device. A draw that cannot be
    divided comes from the default generator, whose state shows it: one in place, one for a tensor
    whose dim 0 the microbatches do not divide, or one within another function, as
    `torch.nn.MultiheadAttention` uses.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        """`seeds` are those of the pass' microbatches, which have equal sizes."""
        super().__init__()
        self.has_divided = False
        self._generator = default_generator(device)
        seed_of = (lambda seed: seed) if device.type == "cuda" else forward_seed
        self._states = [
            torch.Generator(device).manual_seed(seed_of(seed)).get_state() for seed in seeds
        ]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is None:
            kwargs.pop("generator", None)  # not every function that makes a tensor takes it
            if function in OF_ELEMENTS and self._divides(function, args, kwargs):
                return self._call_for_each(function, args, kwargs)
            if function in FILLS and self._has_equal_parts(args[0]):
                self._fill(function, args, kwargs)
                return args[0]
            if function is torch.rand or function is torch.randn:
                return self._make(function, args, kwargs)
        return function(*args, **kwargs)

    def _divides(self, function: Any, args: Any, kwargs: Any) -> bool:
        if kwargs.get("inplace"):
            return False
        if function is ATTENTION and not (args[4] if len(args) > 4 else kwargs.get("dropout_p")):
            return False
        return self._has_equal_parts(_first_tensor(args, kwargs))

    def _has_equal_parts(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] % len(self._states) == 0

    def _call_for_each(self, function: Any, args: Any, kwargs: Any) -> Any:
        first = _first_tensor(args, kwargs)
        part_size = first.shape[0] // len(self._states)

        def parts_of(value: Any) -> Sequence[Any]:
            is_divided = (
                isinstance(value, Tensor)
                and value.dim() == first.dim()
                and value.shape[0] == first.shape[0]
            )
            return value.split(part_size) if is_divided else [value] * len(self._states)

        parts = [parts_of(value) for value in args]
        named = {name: parts_of(value) for name, value in kwargs.items()}
        return torch.cat(
            self._with_each_state(
                lambda i: function(
                    *(part[i] for part in parts), **{name: part[i] for name, part in named.items()}
                )
            )
        )

    def _fill(self, function: Any, args: Any, kwargs: Any) -> None:
        tensor, *others = args
        parts = tensor.chunk(len(self._states))
        self._with_each_state(lambda i: function(parts[i], *others, **kwargs))

    def _make(self, function: Any, args: Any, kwargs: Any) -> Any:
        made = torch.empty(*args, **kwargs)
        if not self._has_equal_parts(made):
            return function(*args, **kwargs)
        self._fill(Tensor.uniform_ if function is torch.rand else Tensor.normal_, (made,), {})
        return made

    def _with_each_state(self, call: Callable[[int], Any]) -> list[Any]:
        """The results of a call for each microbatch, made with its state of the generator."""
        generator, kept = self._generator, self._generator.get_state()
        self.has_divided = True
        results = []
        for i, state in enumerate(self._states):
            generator.set_state(state)
            results.append(call(i))
            self._states[i] = generator.get_state()
        generator.set_state(kept)
        return results


def _first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
