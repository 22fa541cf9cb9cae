"""Where a script keeps variables, each place as a table of names and values."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from pipelines.loop.state.reached_objects import MOST_PARTS
from pipelines.settings.user_code import is_users

DICTIONARIES = (dict, defaultdict, OrderedDict, Counter)
"""Others may refuse changes."""

Table = MutableMapping[Any, Any]


def table_of(value: Any) -> Table | None:
    """The items of a dictionary; the attributes of an object or a class of the user's, or the
    global variables of the user's module; the variables of a function that its maker has left to
    it. None for all else.

    Modules of torch are part of the run's state, and a dataset may be read by other threads.
    """
    read = _reader_of(type(value))  # type: ignore[arg-type]
    return read(value) if read else None


@lru_cache(maxsize=4096)
def _reader_of(kind: type) -> Callable[[Any], Table | None] | None:
    """The function that returns the table of an object of this class; None if it has none."""
    if issubclass(kind, dict):
        return _small_dictionary if kind in DICTIONARIES else None
    if issubclass(kind, ModuleType):
        return _globals_of_module
    if issubclass(kind, FunctionType):
        return _variables_of_function
    if issubclass(kind, type):
        return _attributes_of_class
    if issubclass(kind, nn.Module | Tensor | Dataset) or not _is_of_user(kind.__module__):
        return None
    if kind.__dictoffset__:
        return vars
    slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
    return lambda item: _Attributes(item, lambda: slots)


def _small_dictionary(items: dict[Any, Any]) -> Table | None:
    return items if len(items) <= MOST_PARTS else None


def _variables_of_function(function: FunctionType) -> Table | None:
    has_own = function.__closure__ and _is_of_user(function.__module__)
    return _Cells(function) if has_own else None


def _globals_of_module(module: ModuleType) -> Table | None:
    return _Attributes(module, vars(module).keys) if _is_of_user(module.__name__) else None


def _attributes_of_class(kind: type) -> Table | None:
    return _Attributes(kind, vars(kind).keys) if _is_of_user(kind.__module__) else None


def _is_of_user(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return bool(file) and is_users(str(file))


class _Attributes(MutableMapping[str, Any]):
    """The attributes of a class or a module, or of an object without a dictionary."""

    def __init__(self, owner: Any, names: Callable[[], Any]) -> None:
        self._owner, self._names = owner, names

    def __iter__(self) -> Iterator[str]:
        return (name for name in [*self._names()] if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setter = type if isinstance(self._owner, type) else object
        setter.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        """What is new stays, such as a module that a function has imported."""


class _Cells(MutableMapping[int, Any]):
    """The variables of a function that its maker has left to it."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = function.__closure__ or ()

    def __iter__(self) -> Iterator[int]:
        return (number for number, cell in enumerate(self._cells) if _is_filled(cell))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, number: int) -> Any:
        return self._cells[number].cell_contents

    def __setitem__(self, number: int, value: Any) -> None:
        self._cells[number].cell_contents = value

    def __delitem__(self, number: int) -> None:
        """A function keeps its variables."""


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # it has no value yet
        return False
