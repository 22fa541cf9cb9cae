"""Finds variables of a script that change from step to step but are not part of the run's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any
from weakref import ref
from zlib import adler32

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from actors.distributed.torch_private import num_changes
from pipelines.loop.state.errors import LoopMisused

NUM_WATCHED_STEPS = 3
"""After these a script's variables are no longer looked at."""
NUM_LOOKED_AT = 1000
"""So many of the first items of a list are looked at."""
WATCHED = (nn.Module, Tensor, np.ndarray, list, dict)
NUM_BYTES = 1 << 20
"""So many of the first bytes of an array are compared."""
_Mark = tuple["ref[Any]", int]


class CarriedState:
    """The modules, tensors and arrays, and collections of tensors and arrays, that a script has
    made before its loop.

    Variables of its function are watched, and attributes of objects of its own classes.
    """

    def __init__(
        self, frame: FrameType | None, known: Iterable[Any], kept: Sequence[Any] = ()
    ) -> None:
        """`frame` is that of the script's function; known objects and tensors are not watched, and
        `kept` are those of `run.keep`."""
        self._known = {id(item) for item in (*known, *kept)}
        self._frame = frame
        self._kept_variables = {
            name: value
            for name, value in (frame.f_locals if frame else {}).items()
            if isinstance(value, Tensor) and any(value is item for item in kept)
        }
        self._watched = {
            name: (value, self._marks(value))
            for name, value in _variables(frame)
            if isinstance(value, WATCHED) and id(value) not in self._known
        }
        self._num_steps = 0

    def changed(self) -> list[str]:
        """The names of those that have changed since the step before; for the first steps only.

        Raises `LoopMisused` if a variable has another tensor than the one that is kept.
        """
        self._num_steps += 1
        self._refuse_rebound()
        names = [
            name for name, (value, old) in self._watched.items() if _differ(self._marks(value), old)
        ]
        if self._num_steps == NUM_WATCHED_STEPS or names:
            self._watched, self._kept_variables, self._frame = {}, {}, None
        return names

    def _refuse_rebound(self) -> None:
        for name, kept in self._kept_variables.items():
            if self._frame is not None and self._frame.f_locals.get(name) is not kept:
                raise LoopMisused(
                    f"run.keep: {name} is another tensor now, but the run keeps the first one: "
                    f"change it in place, as in {name}.mul_(0.9).add_(...)"
                )

    def _marks(self, value: Any) -> list[_Mark]:
        """Which tensors and arrays a value has, and how often each tensor has been changed, or a
        checksum of the array."""
        return [
            (ref(item), _mark_of(item))
            for item in _values_of(value)
            if id(item) not in self._known
            and not (isinstance(item, Tensor) and item.is_inference())
        ]


def _differ(new: list[_Mark], old: list[_Mark]) -> bool:
    return len(new) != len(old) or any(
        a() is not b() or i != k for (a, i), (b, k) in zip(new, old, strict=True)
    )


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    if frame is None:
        return
    for name, value in frame.f_locals.items():
        is_own = type(value).__module__ == frame.f_globals.get("__name__")
        if is_own and not isinstance(value, nn.Module | Tensor):
            for key, part in getattr(value, "__dict__", {}).items():
                yield f"{name}.{key}", part
        else:
            yield name, value


def _mark_of(item: Tensor | NDArray[Any]) -> int:
    if isinstance(item, Tensor):
        return num_changes(item)
    return adler32(item.ravel()[: NUM_BYTES // item.itemsize].tobytes())


def _values_of(value: Any) -> Iterator[Tensor | NDArray[Any]]:
    """Its tensors and arrays of several elements: single numbers are mostly notes of what has
    happened."""
    items: Iterable[Any]
    match value:
        case nn.Module():
            items = [*value.parameters(), *value.buffers()]
        case Tensor() | np.ndarray():
            items = [value]
        case Mapping():
            items = value.values()
        case _:
            items = value[:NUM_LOOKED_AT]
    for item in items:
        is_tensor = isinstance(item, Tensor) and item.numel() > 1
        is_array = isinstance(item, np.ndarray) and item.size > 1
        if is_tensor or (is_array and not item.dtype.hasobject):
            yield item
