"""A check that the objects sent to workers can be pickled, before any process is started."""

from __future__ import annotations

import copyreg
import dis
import importlib
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from inspect import getclosurevars
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ray import cloudpickle

MAX_DEPTH = 6
"""How deep a culprit is searched for."""


class _NullFile:
    """A file that discards its bytes."""

    def write(self, data: Any) -> int:
        return len(data)


def why_unpicklable(value: object) -> str | None:
    """Why a value cannot be pickled, in one line; None if it can.

    It is pickled as Ray does it; the result is discarded, and large buffers are not copied.
    """
    pickle_modules_by_name()
    try:
        cloudpickle.Pickler(_NullFile(), protocol=5, buffer_callback=_ignore).dump(value)
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        return f"{type(error).__name__}: {reason}"
    return None


def first_unpicklable(parts: Mapping[str, object]) -> tuple[str, str] | None:
    """The name of the first part that cannot be pickled, and why."""
    for name, part in parts.items():
        if why := why_unpicklable(part):
            return name, why
    return None


def unpicklable_variable(function: object) -> tuple[str, object] | None:
    """The variable of a function, or what it holds, such as `config['lock']`, that cannot be
    pickled; None if it is not known."""
    name, value = "", function
    for _ in range(MAX_DEPTH):
        parts = first_unpicklable(dict(_parts_of(value, name)))
        if parts is None:
            break
        name, value = parts[0], dict(_parts_of(value, name))[parts[0]]
    return (name, value) if name else None


def pickle_modules_by_name() -> None:
    """Let modules of special types, such as `torch.backends.cudnn`, be pickled as others are."""
    for module in [*sys.modules.values()]:
        kind = type(module)
        is_special = kind is not ModuleType and issubclass(kind, ModuleType)
        if is_special and kind.__reduce_ex__ is object.__reduce_ex__:
            copyreg.pickle(kind, _by_name)


def _by_name(module: ModuleType) -> tuple[Any, tuple[str]]:
    return importlib.import_module, (module.__name__,)


def _parts_of(value: object, name: str) -> Iterator[tuple[str, object]]:
    """What a value holds, by how a program would name it."""
    if isinstance(value, partial):
        yield from _parts_of(value.func, name)
        yield from value.keywords.items()
    elif isinstance(value, MethodType):
        yield from _parts_of(value.__self__, "self")
    elif isinstance(value, FunctionType):
        yield from _variables_of(value)
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{number}]", part) for number, part in enumerate(value))
    elif not isinstance(value, type | ModuleType):
        yield from ((f"{name}.{key}", part) for key, part in getattr(value, "__dict__", {}).items())


def _variables_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    """The variables around a function that it uses, and its defaults."""
    yield from getclosurevars(function).nonlocals.items()
    for used in _globals_in(function.__code__):
        if used in function.__globals__:
            yield used, function.__globals__[used]


def _globals_in(code: CodeType) -> Iterator[str]:
    yield from (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_in(constant)


def _ignore(buffer: object) -> None:
    """Returning a false value keeps the buffer out of the stream."""
