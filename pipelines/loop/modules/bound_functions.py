"""Functions that a module has as attributes and that refer to parts of the model.

As in `self.mlp = lambda x: second(first(x))`, with parts that are also children of the module. For
`deepcopy` such a function is one object, so the copy of a model would compute with the parts of the
original.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from pipelines.loop.modules.module_objects import is_attribute


def bind_functions(modules: Iterable[nn.Module], copies: Mapping[int, Any]) -> None:
    """Let such functions of copied modules refer to copies. `copies` are those of the modules,
    their tensors and the models, by the ids of the originals."""
    for module in modules:
        for name, value in vars(module).items():
            if is_attribute(name) and (bound := bound_to(value, copies)) is not value:
                vars(copies.get(id(module)))[name] = bound


def bound_to(value: Any, copies: Mapping[int, Any]) -> Any:
    """The value, or if it is such a function, one that refers to the copies."""
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    parts = [_content(cell) for cell in value.__closure__]
    copied_parts = [
        copies.get(id(part)) if isinstance(part, nn.Module | Tensor) else None for part in parts
    ]
    if all(copied is None for copied in copied_parts):
        return value
    cells = [
        cell if copied is None else CellType(copied)
        for cell, copied in zip(value.__closure__, copied_parts, strict=True)
    ]
    name, defaults = value.__name__, value.__defaults__
    bound = FunctionType(value.__code__, value.__globals__, name, defaults, tuple(cells))
    bound.__kwdefaults__ = value.__kwdefaults__
    bound.__dict__.update(value.__dict__)
    return bound


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not set yet
        return None
