"""Numbers that a script counts itself, set back when a step comes again."""

from __future__ import annotations

import sys
from itertools import islice
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from pipelines.loop.state.reached_objects import reached
from pipelines.settings.user_code import is_users

DEPTH = 4
"""How far objects and containers in them are followed, as to the wrapper of an optimizer."""
MOST_OBJECTS = 1000
"""So many objects are noted in each step; those near the function's variables come first."""


class ScriptNumbers:
    """The global variables of a script, and the attributes of objects of the user's classes that it
    has made before its loop, as far as these are plain numbers.

    The body of a step that fails has counted, and counts once more when the step comes again. Local
    variables cannot be set back.
    """

    def __init__(self, frame: FrameType | None) -> None:
        """`frame` is that of the script's function."""
        self._tables: list[dict[str, Any]] = []
        """What holds the numbers, by name."""
        if frame is not None:
            values = [*frame.f_locals.values(), *frame.f_globals.values()]
            objects = filter(_is_of_user, reached(values, DEPTH, _is_of_user))
            self._tables.append(frame.f_globals)
            self._tables += [vars(item) for item in islice(objects, MOST_OBJECTS)]
        self._noted: list[dict[str, Any]] = []

    def note(self) -> None:
        """The numbers are those with which the present step begins."""
        self._noted = [_numbers_in(table) for table in self._tables]

    def restore(self) -> None:
        """Begin the present step again with its numbers."""
        for table, noted in zip(self._tables, self._noted, strict=False):
            for name in _numbers_in(table).keys() & noted.keys():
                table[name] = noted[name]


def _is_of_user(value: Any) -> bool:
    """Whether it has attributes and its class is the user's; modules are part of the run's state,
    and a dataset may be read by other threads."""
    if isinstance(value, type | nn.Module | Tensor | Dataset) or not hasattr(value, "__dict__"):
        return False
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return bool(file) and is_users(str(file))


def _numbers_in(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if type(value) in (int, float)}
