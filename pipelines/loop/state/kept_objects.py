"""Objects that a script changes itself from step to step, such as averaged weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from actors.distributed.torch_private import copy_tensors
from elastic.geometry.tensor_specs import ITEMSIZE_BYTES
from pipelines.loop.state.errors import LoopMisused
from pipelines.training.workload.state import name_of

SEPARATOR = "/"
NUM_COMPARED = 16
KEPT_VALUES = (Tensor, np.ndarray, bool, int, float, np.generic)
MOST = 2.0**53
"""Up to this every integer is a float64."""


class KeptObjects:
    """Tensors, arrays, dictionaries, modules and other objects with a `state_dict`, as named
    tensors.

    Every worker has the whole of each, and its script changes it as those of the others do. So the
    numbers in them are part of the run's state as one copy.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.kept: dict[str, Tensor] = {}
        """The values at the beginning of the present step, contiguous."""

    def add(self, item: Any) -> None:
        """Raises `LoopMisused` for an object whose values cannot be read and written."""
        is_known = isinstance(item, Tensor | np.ndarray | MutableMapping) or (
            hasattr(item, "state_dict") and hasattr(item, "load_state_dict")
        )
        if not is_known:
            raise LoopMisused(
                f"run.keep: cannot keep {type(item).__name__}; pass a tensor or an "
                "array that is changed in place, a dictionary of these and numbers, or an object "
                "with state_dict() and load_state_dict()"
            )
        if any(item is known for known in self.objects):
            return
        if isinstance(item, MutableMapping):
            _refuse_other_values(item)
        self.objects.append(item)

    def begin(self) -> dict[str, Tensor]:
        """Take the values of step 0, and return copies of them. Raises `LoopMisused` for tensors
        that cannot be part of the state, and for an object without any."""
        live = self._live()
        for number, item in enumerate(self.objects):
            if not any(name.startswith(_root(number)) for name in live):
                raise LoopMisused(
                    f"run.keep: the state of {type(item).__name__} has no tensor or number, so "
                    "nothing would be kept: give a dictionary its first values, and make the "
                    "buffers of a module persistent, those of torchmetrics by "
                    "metric.persistent(True)"
                )
        for name, value in live.items():
            if (dtype := name_of(value.dtype)) not in ITEMSIZE_BYTES:
                raise LoopMisused(
                    f"run.keep: {_described(name)} is of {dtype}, which is not supported; use one "
                    f"of {', '.join(ITEMSIZE_BYTES)}"
                )
        self.kept = {name: _contiguous(value) for name, value in live.items()}
        return {name: _contiguous(value) for name, value in live.items()}

    def refuse_shared(self, models: list[nn.Module]) -> None:
        """Raise `LoopMisused` for an object that holds a prepared model, which the run keeps."""
        addresses = {
            value.untyped_storage().data_ptr()
            for model in models
            for value in (*model.parameters(), *model.buffers())
            if value.numel()
        }
        for name, value in self._live().items():
            if value.numel() and value.untyped_storage().data_ptr() in addresses:
                raise LoopMisused(
                    f"run.keep: {_described(name)} belongs to a prepared model, which keeps it; "
                    "keep only what the script itself changes, such as an average of it"
                )

    def keep(self) -> None:
        """Begin the next step with the present values. Raises `LoopMisused` for other shapes."""
        live = self._live()
        if changed := live.keys() ^ self.kept.keys():
            raise LoopMisused(
                f"run.keep: {_described(min(changed))} was added or removed in the loop; give it "
                "its first value before run.steps"
            )
        for name, value in live.items():
            kept = self.kept[name]
            if (value.shape, value.dtype) != (kept.shape, kept.dtype):
                raise LoopMisused(
                    f"run.keep: {_described(name)} has changed from shape {tuple(kept.shape)} of "
                    f"{kept.dtype} to {tuple(value.shape)} of {value.dtype}; keep the shape"
                )
        if live:
            copy_tensors([self.kept[name] for name in live], list(live.values()))

    def live(self) -> dict[str, Tensor]:
        """Copies of the present values."""
        return {name: _contiguous(value) for name, value in self._live().items()}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take these as the values at the beginning of the present step."""
        for name, kept in self.kept.items():
            kept.copy_(values[name])

    @torch.no_grad()
    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Begin a step again, or in another worker's place, with its values."""
        for number, item in enumerate(self.objects):
            prefix = _root(number)
            match item:
                case Tensor():
                    item.copy_(values[prefix])
                case np.ndarray():
                    _restored(item, prefix, values)
                case MutableMapping():
                    item.update(_restored(item, prefix, values))
                case _:
                    item.load_state_dict(_restored(item.state_dict(), prefix, values))

    def are_exact(self) -> list[bool]:
        """Whether each kept tensor has integers, or one number."""
        return [v.numel() <= 1 or not v.is_floating_point() for v in self.kept.values()]

    def _live(self) -> dict[str, Tensor]:
        """The live tensors, and numbers as tensors."""
        live: dict[str, Tensor] = {}
        for number, item in enumerate(self.objects):
            is_plain = isinstance(item, Tensor | np.ndarray | MutableMapping)
            live.update(_leaves(item if is_plain else item.state_dict(), _root(number)))
        return live


def samples_of(tensors: Iterable[Tensor]) -> Tensor:
    """A few values of each tensor on the host, shape (number of tensors, NUM_COMPARED), float64,
    filled up with zeros. What is not finite counts as 0."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in tensors:
        flat = value.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // NUM_COMPARED)][:NUM_COMPARED].double()
        filled = nn.functional.pad(some, (0, NUM_COMPARED - len(some)))
        by_device.setdefault(value.device, []).append(filled)
    rows = [torch.stack(values).cpu() for values in by_device.values()]
    empty = torch.zeros(0, NUM_COMPARED, dtype=torch.float64)
    return torch.cat([empty, *rows]).nan_to_num(0.0, 0.0, 0.0)


def _contiguous(value: Tensor) -> Tensor:
    """A copy whose elements have the same order in memory on each worker."""
    return value.clone(memory_format=torch.contiguous_format)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    match value:
        case DTensor():
            raise LoopMisused(f"run.keep: {_described(path)} is a part of a sharded tensor")
        case Tensor():
            yield path, value.detach()
        case np.ndarray():
            yield path, _tensor_of(value, path)
        case bool() | int() | float() | np.generic():
            number = float(value)
            if abs(number) > MOST and number.is_integer():
                raise LoopMisused(f"run.keep: {_described(path)} is too large: keep it as a tensor")
            yield path, torch.tensor(number, dtype=torch.float64)
        case Mapping():
            for key, part in value.items():
                yield from _leaves(part, _joined(path, key))
        case list() | tuple() | deque():
            for key, part in enumerate(value):
                yield from _leaves(part, _joined(path, key))


def _restored(value: Any, path: str, values: Mapping[str, Tensor]) -> Any:
    """The value with the numbers in `values`. Its tensors are changed in place, so that others that
    have them see it; a number has the type that it had, if that can hold it."""
    match value:
        case Tensor():
            kept = values[path]
            if value.is_inference() or (value.shape, value.dtype) != (kept.shape, kept.dtype):
                return kept.clone()
            return value.copy_(kept)
        case np.ndarray():
            kept_values = values[path].cpu().numpy().view(value.dtype)
            if not value.flags.writeable or value.shape != kept_values.shape:
                return kept_values.copy()
            value[...] = kept_values
            return value
        case bool():
            return bool(values[path])
        case int():
            number = float(values[path])
            return int(number) if number.is_integer() else number
        case float() | np.generic():
            return type(value)(values[path].item())
        case Mapping():
            restored = copy(value)  # with the attributes that a module's `state_dict` has
            for key, part in value.items():
                restored[key] = _restored(part, _joined(path, key), values)  # type: ignore[index]
            return restored
        case deque():
            parts = [_restored(part, _joined(path, k), values) for k, part in enumerate(value)]
            return deque(parts, value.maxlen)
        case list() | tuple():
            parts = [_restored(part, _joined(path, k), values) for k, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _refuse_other_values(item: Mapping[Any, Any]) -> None:
    for key, value in item.items():
        if not isinstance(value, KEPT_VALUES):
            raise LoopMisused(
                f"run.keep: {key!r} is {type(value).__name__}: a dictionary that is kept may hold "
                "tensors, arrays and numbers"
            )


def _tensor_of(array: NDArray[Any], path: str) -> Tensor:
    """A tensor of an array's values, if it can in the same memory. Unsigned integers, such as the
    state of a generator, become signed ones of the same bits."""
    values = np.require(array, requirements=["C", "W"])
    if values.dtype.kind == "u" and values.itemsize > 1:
        values = values.view(f"i{values.itemsize}")
    try:
        return torch.from_numpy(values)
    except TypeError:
        raise LoopMisused(
            f"run.keep: {_described(path)} is an array of {array.dtype}, which is not supported; "
            "use one of numbers"
        ) from None


def _root(number: int) -> str:
    return f"{SEPARATOR}{number}{SEPARATOR}"


def _joined(path: str, key: object) -> str:
    return f"{path}{key}" if path.endswith(SEPARATOR) else f"{path}{SEPARATOR}{key}"


def _described(path: str) -> str:
    _, number, name = path.split(SEPARATOR, 2)
    return name or f"object {number}"
