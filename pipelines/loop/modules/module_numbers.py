"""The modes and numbers of a script's modules, as one vector of the run's state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from pipelines.loop.modules.model_views import plain
from pipelines.loop.modules.module_objects import is_attribute

MOST = 2**53
"""Up to this every integer is a float64."""
NONE = -float(2**1023)
"""In place of None."""


class ModuleNumbers:
    """Modes, such as that of a BatchNorm which the script freezes, and attributes that are numbers,
    such as a temperature.

    The script changes them on each worker alike; a worker that joins gets them.
    """

    def __init__(self, models: Iterable[nn.Module] = ()) -> None:
        modules = {id(vars(m)): m for model in models for m in (model, *_parts(model))}
        self._places = [
            (vars(module), name)
            for module in modules.values()
            for name, value in vars(module).items()
            if is_attribute(name) and _is_number(value)
        ]
        self.kept = self._read([NONE] * len(self._places))
        """All at the beginning of the present step."""
        self.initial = list(self.kept)

    def keep(self) -> None:
        """Begin the next step with the present numbers."""
        self.kept = self._read(self.kept)

    def live(self) -> list[float]:
        return self._read(self.kept)

    def restore(self, numbers: Sequence[float]) -> None:
        """Begin a step again, or in another worker's place, with its numbers."""
        for (attributes, name), number in zip(self._places, numbers, strict=True):
            attributes[name] = _as_before(attributes.get(name), number)

    def _read(self, otherwise: Sequence[float]) -> list[float]:
        """The numbers now; those before for attributes that have become something else."""
        present = (attributes.get(name, "") for attributes, name in self._places)
        return [
            (NONE if value is None else float(value)) if _is_number(value) else before
            for value, before in zip(present, otherwise, strict=True)
        ]


def _parts(model: nn.Module) -> list[nn.Module]:
    return [part for name, part in plain(model).named_modules() if name]


def _is_number(value: Any) -> bool:
    return value is None or (
        type(value) in (bool, int, float) and (type(value) is float or abs(value) <= MOST)
    )


def _as_before(value: Any, number: float) -> Any:
    """The number in the type of an attribute's value, which is the value itself if it is equal."""
    if number == NONE:
        return None
    if type(value) in (bool, int, float) and value == number:
        return value
    if isinstance(value, bool) and number in (0, 1):
        return bool(number)
    return int(number) if isinstance(value, int | None) and number.is_integer() else number
