"""Recording of the distribution from which a constructor draws each large tensor, without drawing.

The constructor runs on the host, except for operations on large tensors: their memory is reserved
and never touched, and the operation that would fill it is recorded by storage. Before any other
operation on such a tensor the recorded one runs, so an operation that cannot be recorded reads real
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from actors.distributed.torch_private import (
    TO_COPY,
    TorchDispatchMode,
    replace_truncated_normal,
    storage_key,
)
from pipelines.training.workload.initial_values import (
    Constant,
    Distribution,
    Normal,
    TruncatedNormal,
    Uniform,
)
from pipelines.training.workload.seeds import keyed_generator
from pipelines.training.workload.trees import tensors_in

LEAST_ELEMENTS = 1 << 16
"""Minimum size of a recorded tensor; smaller tensors get their values at once."""

aten = torch.ops.aten


def _uniform(low: float = 0.0, high: float = 1.0) -> Uniform:
    return Uniform(low, high)


def _normal(mean: float = 0.0, std: float = 1.0) -> Normal:
    return Normal(mean, std)


OVERWRITES: dict[Any, Callable[..., Distribution]] = {
    aten.normal_.default: _normal,
    aten.uniform_.default: _uniform,
    aten.fill_.Scalar: Constant,
    aten.zero_.default: lambda: Constant(0.0),
}
"""Operations that overwrite a full tensor, and the distribution of the new values."""
FACTORIES: dict[Any, Callable[..., Distribution | None]] = {
    aten.empty.memory_format: lambda: None,
    aten.zeros.default: lambda: Constant(0.0),
    aten.ones.default: lambda: Constant(1.0),
    aten.randn.default: _normal,
    aten.rand.default: _uniform,
}
"""Operations that create a tensor of a size, and the distribution of its values."""
VIEWS = {
    aten.detach.default,
    aten.alias.default,
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.split.Tensor,
}
"""Operations that return a view of a tensor's memory."""
COPIES = {aten.clone.default, TO_COPY}
VALUE_FREE_OPTIONS = (
    "generator",
    "dtype",
    "layout",
    "device",
    "pin_memory",
    "memory_format",
    "non_blocking",
)
"""Options that do not change a tensor's values."""


def _scaled(distribution: Distribution, factor: float) -> Distribution | None:
    match distribution:
        case Constant(value):
            return Constant(value * factor)
        case Normal(mean, std):
            return Normal(mean * factor, std * factor)
        case Uniform(low, high):
            return Uniform(low * factor, high * factor)
        case TruncatedNormal() if not distribution.is_clamped:
            return replace(
                distribution, mean=distribution.mean * factor, scale=distribution.scale * factor
            )
    return None


def _shifted(distribution: Distribution, shift: float) -> Distribution | None:
    match distribution:
        case Constant(value):
            return Constant(value + shift)
        case Normal(mean, std):
            return Normal(mean + shift, std)
        case Uniform(low, high):
            return Uniform(low + shift, high + shift)
        case TruncatedNormal() if not distribution.is_clamped:
            return replace(distribution, mean=distribution.mean + shift)
    return None


def _erfinv(distribution: Distribution) -> Distribution | None:
    return (
        TruncatedNormal(distribution.low, distribution.high)
        if isinstance(distribution, Uniform)
        else None
    )


def _clamped(distribution: Distribution, minimum: float, maximum: float) -> Distribution | None:
    if not isinstance(distribution, TruncatedNormal) or distribution.is_clamped:
        return None
    return replace(distribution, minimum=minimum, maximum=maximum)


CHANGES: dict[Any, Callable[..., Distribution | None]] = {
    aten.mul_.Tensor: _scaled,
    aten.mul_.Scalar: _scaled,
    aten.div_.Tensor: lambda distribution, divisor: _scaled(distribution, 1.0 / divisor),
    aten.add_.Tensor: _shifted,
    aten.sub_.Tensor: lambda distribution, shift: _shifted(distribution, -shift),
    aten.erfinv_.default: _erfinv,
    aten.clamp_.default: _clamped,
}
"""Elementwise operations that change a full tensor in place, as `trunc_normal_` does."""
CHANGED_COPIES: dict[Any, Callable[..., Distribution | None]] = {
    aten.mul.Tensor: _scaled,
    aten.div.Tensor: CHANGES[aten.div_.Tensor],
    aten.add.Tensor: _shifted,
    aten.sub.Tensor: CHANGES[aten.sub_.Tensor],
    **{copy: lambda distribution: distribution for copy in COPIES},
}


@dataclass
class RecordedFill:
    """The content that a tensor's memory would have: uninitialised (None), or a distribution.

    It keeps the storage alive, so no other storage gets its key.

    Tensors with the same `draw`, such as copies, have the same values up to later operations.
    """

    tensor: Tensor
    distribution: Distribution | None
    draw: int


class Recorder(TorchDispatchMode):
    """While active, records how large tensors on the host are filled instead of filling them."""

    def __init__(self, seed: int = 0, least_elements: float = LEAST_ELEMENTS) -> None:
        TorchDispatchMode.__init__(self)
        self._seed = seed
        self._least_elements = least_elements
        self._records: dict[int, RecordedFill] = {}
        self._watched: dict[int, Tensor] = {}
        self._num_draws = 0
        self._real_draws: set[int] = set()
        self._thread = 0

    def watch(self, tensor: Tensor) -> None:
        """Record operations on this tensor from now on, whatever its size and device."""
        self._watched[storage_key(tensor)] = tensor
        self._set_record(tensor, None)

    def __enter__(self) -> Recorder:
        """Replace `trunc_normal_`, which no dispatched operation reveals: it redraws until all
        values fit."""
        self._thread = get_ident()
        self._draw_truncated = replace_truncated_normal(self._record_truncated)
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        TorchDispatchMode.__exit__(self, *raised)
        replace_truncated_normal(self._draw_truncated)

    def _record_truncated(
        self, tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        if get_ident() != self._thread or not self._is_full_tensor(tensor):
            return self._draw_truncated(tensor, mean, std, a, b, generator)
        self._set_record(tensor, TruncatedNormal.between(mean, std, a, b))
        return tensor

    def record(self, tensor: Tensor) -> RecordedFill | None:
        """How a tensor would be filled; None if it has real values."""
        record = self._records.get(storage_key(tensor))
        if record is None:
            return None
        is_full = tensor.numel() == record.tensor.numel()
        if record.distribution is None or not is_full or record.draw in self._real_draws:
            self._fill(record)
            return None
        return record

    def make_real(self, tensor: Tensor) -> None:
        """Fill a tensor if it is only recorded."""
        record = self._records.get(storage_key(tensor))
        if record is not None:
            self._fill(record)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        values = {k: v for k, v in options.items() if k not in VALUE_FREE_OPTIONS}
        if func in FACTORIES and self._is_large(args[0], options):
            return self._make(func, args, options, values)
        if func in OVERWRITES and self._is_full_tensor(args[0]):
            self._set_record(args[0], OVERWRITES[func](*args[1:], **values))
            return args[0]
        records = list(self._records_in(args, options))
        if not records or func in VIEWS:
            return func(*args, **options)
        changed = self._changed(func, args, values)
        if changed is not None and func in CHANGES:
            records[0].distribution = changed
            return args[0]
        if changed is not None and options.get("device") in (None, torch.device("cpu")):
            copy = torch.empty_like(args[0], dtype=options.get("dtype"))
            self._set_record(copy, changed, records[0].draw)
            return copy
        for record in records:
            self._fill(record)
        return func(*args, **options)

    def _make(
        self, func: Any, args: Sequence[Any], options: dict[str, Any], values: dict[str, Any]
    ) -> Tensor:
        options = {k: v for k, v in options.items() if k in VALUE_FREE_OPTIONS and k != "generator"}
        tensor: Tensor = aten.empty.memory_format(args[0], **options)
        self._set_record(tensor, FACTORIES[func](*args[1:], **values))
        return tensor

    def _changed(
        self, func: Any, args: Sequence[Any], values: Mapping[str, Any]
    ) -> Distribution | None:
        """The distribution of a recorded full tensor after an operation; None if unknown."""
        change = CHANGES.get(func) or CHANGED_COPIES.get(func)
        record = self._records.get(storage_key(args[0])) if isinstance(args[0], Tensor) else None
        numbers = (*args[1:], *values.values())
        if change is None or record is None or record.distribution is None:
            return None
        if not all(isinstance(number, int | float) for number in numbers):
            return None
        if args[0].numel() != record.tensor.numel() or not args[0].is_contiguous():
            return None
        return change(record.distribution, *args[1:], **values) if not values else None

    def _is_large(self, size: Sequence[int], options: Mapping[str, Any]) -> bool:
        dtype = options.get("dtype") or torch.get_default_dtype()
        on_host = options.get("device") in (None, torch.device("cpu"))
        return on_host and dtype.is_floating_point and prod(size) >= self._least_elements

    def _is_full_tensor(self, tensor: Tensor) -> bool:
        """Whether a tensor covers its storage and is recorded or large enough to be."""
        is_full = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
        if storage_key(tensor) in self._records or storage_key(tensor) in self._watched:
            return is_full
        options = {"dtype": tensor.dtype, "device": tensor.device}
        return is_full and self._is_large(tensor.shape, options)

    def _set_record(
        self, tensor: Tensor, distribution: Distribution | None, draw: int | None = None
    ) -> None:
        self._num_draws += 1
        number = self._num_draws if draw is None else draw
        self._records[storage_key(tensor)] = RecordedFill(tensor.detach(), distribution, number)

    def _records_in(
        self, args: Sequence[Any], options: Mapping[str, Any]
    ) -> Iterator[RecordedFill]:
        for value in tensors_in((tuple(args), dict(options))):
            if storage_key(value) in self._records:
                yield self._records[storage_key(value)]

    def _fill(self, record: RecordedFill) -> None:
        """Run the recorded operation; copies of one draw get the same values."""
        if self._records.pop(storage_key(record.tensor), None) is None:
            return
        self._real_draws.add(record.draw)
        generator = keyed_generator("recorded", self._seed, record.draw)
        tensor = record.tensor
        with torch.no_grad():
            match record.distribution:
                case Constant(value):
                    tensor.fill_(value)
                case Normal(mean, std):
                    tensor.normal_(0.0, 1.0, generator=generator).mul_(std).add_(mean)
                case Uniform(low, high):
                    tensor.uniform_(0.0, 1.0, generator=generator).mul_(high - low).add_(low)
                case TruncatedNormal() as distribution:
                    tensor.uniform_(
                        distribution.low, distribution.high, generator=generator
                    ).erfinv_()
                    tensor.mul_(distribution.scale).add_(distribution.mean).clamp_(
                        distribution.minimum, distribution.maximum
                    )
