"""Models that a script makes at the top of its file, instead of in its function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

from torch import nn

from pipelines.settings.script_file import module_of, run_again

MOST_PARTS = 100
"""The items of a container that are looked at."""
_makes_model: dict[str | None, bool] = {}
"""By file, whether it had made a model when it was first run."""


def with_file_models(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which first runs its file again if that makes a model outside of functions.

    A script's function runs several times in a process, and each time begins with the values of
    step 0: the same on all workers, as the random generators are seeded here.
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    module = module_of(inner)
    if module is None:
        return function

    def run(*arguments: Any) -> Any:
        if _makes_model.setdefault(module.__file__, _has_model(vars(module).values())):
            run_again(module)
        return function(*arguments)

    return run


def _has_model(values: Iterable[object], depth: int = 2) -> bool:
    """Whether a model is among the values, or in a container or an attribute of one."""
    for value in [*values]:
        if isinstance(value, nn.Module):
            if any(True for _ in value.parameters()):
                return True
        elif depth and _has_model(_parts_of(value), depth - 1):
            return True
    return False


def _parts_of(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return islice(value.values(), MOST_PARTS)
    if isinstance(value, list | tuple):
        return value[:MOST_PARTS]
    is_instance = not isinstance(value, type) and type(value).__module__ != "builtins"
    return vars(value).values() if is_instance and hasattr(value, "__dict__") else ()
