"""Objects that a script changes itself from step to step, such as averaged weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from actors.distributed.torch_private import copy_tensors
from pipelines.loop.prepared.errors import LoopMisused

SEPARATOR = "/"
NUM_COMPARED = 16


class KeptObjects:
    """Tensors, dictionaries, modules and other objects with a `state_dict`, as named tensors.

    Every worker has the whole of each, and its script changes it as those of the others do. So the
    numbers in them are part of the run's state as one copy.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.kept: dict[str, Tensor] = {}
        """The values at the beginning of the present step."""

    def add(self, item: Any) -> None:
        """Raises `LoopMisused` for an object whose values cannot be read and written."""
        is_known = isinstance(item, Tensor | MutableMapping) or (
            hasattr(item, "state_dict") and hasattr(item, "load_state_dict")
        )
        if not is_known:
            raise LoopMisused(
                f"run.keep: cannot keep {type(item).__name__}; pass a tensor that is changed in "
                "place, a dictionary of tensors and numbers, or an object with state_dict() and "
                "load_state_dict()"
            )
        if any(item is known for known in self.objects):
            return
        if isinstance(item, MutableMapping):
            _refuse_other_values(item)
        self.objects.append(item)

    def begin(self) -> dict[str, Tensor]:
        """Take the values of step 0, and return copies of them."""
        self.kept = {name: value.clone() for name, value in self._live().items()}
        return {name: value.clone() for name, value in self.kept.items()}

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

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take these as the values at the beginning of the present step."""
        for name, kept in self.kept.items():
            kept.copy_(values[name])

    @torch.no_grad()
    def restore(self) -> None:
        """Begin a step again, or in another worker's place, with its values."""
        for number, item in enumerate(self.objects):
            prefix = _root(number)
            match item:
                case Tensor():
                    item.copy_(self.kept[prefix])
                case MutableMapping():
                    item.update(_replaced(dict(item), prefix, self.kept))
                case _:
                    item.load_state_dict(_replaced(item.state_dict(), prefix, self.kept))

    def sample(self) -> Tensor:
        """A few of the finite values on the host, float64, about the same on all workers."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for value in self.kept.values():
            flat = value.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // NUM_COMPARED)][:NUM_COMPARED]
            by_device.setdefault(value.device, []).append(some.double())
        parts = [torch.cat(values).cpu() for values in by_device.values()]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *parts]).nan_to_num(0.0, 0.0, 0.0)

    def _live(self) -> dict[str, Tensor]:
        """The live tensors, and numbers as tensors."""
        live: dict[str, Tensor] = {}
        for number, item in enumerate(self.objects):
            is_plain = isinstance(item, Tensor | MutableMapping)
            live.update(
                _leaves(item if is_plain else item.state_dict(), f"{SEPARATOR}{number}{SEPARATOR}")
            )
        return live


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    match value:
        case DTensor():
            raise LoopMisused(f"run.keep: {_described(path)} is a part of a sharded tensor")
        case Tensor():
            yield path, value.detach()
        case bool() | int() | float():
            yield path, torch.tensor(value, dtype=torch.float64)
        case Mapping():
            for key, part in value.items():
                yield from _leaves(part, _joined(path, key))
        case list() | tuple():
            for key, part in enumerate(value):
                yield from _leaves(part, _joined(path, key))


def _replaced(value: Any, path: str, values: Mapping[str, Tensor]) -> Any:
    """The value with other tensors and numbers, copies of those in `values`."""
    match value:
        case nn.Parameter():
            return nn.Parameter(values[path].clone(), value.requires_grad)
        case Tensor():
            return values[path].clone()
        case bool() | int() | float():
            return type(value)(values[path].item())
        case Mapping():
            return {k: _replaced(part, _joined(path, k), values) for k, part in value.items()}
        case list() | tuple():
            return type(value)(
                _replaced(part, _joined(path, k), values) for k, part in enumerate(value)
            )
    return value


def _refuse_other_values(item: Mapping[Any, Any]) -> None:
    for key, value in item.items():
        if not isinstance(value, Tensor | bool | int | float):
            raise LoopMisused(
                f"run.keep: {key!r} is {type(value).__name__}: a dictionary that is kept may hold "
                "tensors and numbers"
            )


def _root(number: int) -> str:
    return f"{SEPARATOR}{number}{SEPARATOR}"


def _joined(path: str, key: object) -> str:
    return f"{path}{key}" if path.endswith(SEPARATOR) else f"{path}{SEPARATOR}{key}"


def _described(path: str) -> str:
    _, number, name = path.split(SEPARATOR, 2)
    return name or f"object {number}"
