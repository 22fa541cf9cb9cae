"""Attributes of an object, or items of a dictionary, that are part of a run's state."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.kept_objects import KEPT_VALUES


class NamedValues:
    """An object with a `state_dict` of some attributes of another, or items of a dictionary."""

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        """Raises `LoopMisused` for names without a value that can be kept."""
        if not isinstance(owner, MutableMapping) and not hasattr(owner, "__dict__"):
            raise LoopMisused(f"run.keep: {type(owner).__name__} has no attributes to keep")
        self._values = owner if isinstance(owner, MutableMapping) else vars(owner)
        self._names = [names] if isinstance(names, str) else [*names]
        for name in self._names:
            self._refuse_other(name)

    def state_dict(self) -> dict[str, Any]:
        return {name: self._values[name] for name in self._names}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self._values.update(values)

    def _refuse_other(self, name: str) -> None:
        if name not in self._values:
            raise LoopMisused(f"run.keep: there is no {name!r} yet: set it before run.keep")
        if not isinstance(value := self._values[name], KEPT_VALUES):
            raise LoopMisused(
                f"run.keep: {name!r} is {type(value).__name__}: give it a number, a tensor or an "
                "array as its first value, such as math.inf for the best loss"
            )
