"""Models that a script makes at the top of its file, instead of in its function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from pipelines.loop.state.reached_objects import items_of, reached
from pipelines.settings.script_file import module_of, run_again

DEPTH = 2
"""How far objects and containers are followed."""
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


def _has_model(values: Iterable[object]) -> bool:
    """Whether a model is among the values, or in a container or an attribute of one."""
    return any(
        isinstance(value, nn.Module) and any(True for _ in value.parameters())
        for value in reached(values, DEPTH, _parts_of)
    )


def _parts_of(value: object) -> Iterable[object]:
    is_object = type(value).__module__ != "builtins" and hasattr(value, "__dict__")
    if is_object and not isinstance(value, nn.Module | type):
        return [*items_of(value), *vars(value).values()]
    return items_of(value)
