"""Callbacks from what the user gives: objects, classes, factories, and names of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from typing import Any

from pipelines.callbacks.callback import Callback
from pipelines.callbacks.callback_thread import NamedCallback
from pipelines.errors import UserError
from pipelines.settings.overrides import similar_names
from pipelines.settings.script_file import module_at
from pipelines.settings.user_code import user_code_errors

CallbackLike = str | Callback | Callable[[], Callback]
METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def load_callbacks(callbacks: Iterable[CallbackLike]) -> tuple[NamedCallback, ...]:
    """The callbacks, each with another name.

    A name is `path/to/file.py:NAME` or `module:NAME`. A class or function is called without
    arguments. Raises `UserError` for anything that is or gives no callback, and for one with
    methods that would never be called.
    """
    counts: Counter[str] = Counter()
    named: list[NamedCallback] = []
    for given in callbacks:
        callback = _callback_of(given)
        name = type(callback).__name__
        counts[name] += 1
        number = counts[name]
        named.append(NamedCallback(callback, name if number == 1 else f"{name}-{number}"))
    return tuple(named)


def _callback_of(given: CallbackLike) -> Callback:
    if isinstance(given, str):
        what, value = f"--callback {given}", _named(given)
    else:
        what, value = f"callbacks: {getattr(given, '__qualname__', type(given).__name__)}", given
    verb = "is"
    if callable(value) and not isinstance(value, Callback):
        with user_code_errors(what, is_all_theirs=True):
            _refuse_arguments(what, value)
            verb, value = "gives", value()
    if not isinstance(value, Callback):
        raise UserError(
            f"{what}: {verb} {_described(value)}, not a callback; derive a class from "
            "pipelines.callbacks.Callback"
        )
    _refuse_methods(what, value)
    return value


def _named(given: str) -> Any:
    place, _, name = given.rpartition(":")
    is_file = place.endswith(".py")
    is_module = all(part.isidentifier() for part in place.split("."))
    if not name.isidentifier() or not (is_file or is_module):
        raise UserError(f"--callback {given}: write path/to/file.py:NAME or module:NAME")
    if is_file and not Path(place).is_file():
        raise UserError(f"--callback {given}: there is no file {place}")
    module = module_at(f"--callback {given}", place)
    if not hasattr(module, name):
        names = [key for key, value in vars(module).items() if _is_callback(value)]
        raise UserError(
            f"--callback {given}: {place} has no '{name}'; {similar_names(name, names)}"
        )
    return getattr(module, name)


def _is_callback(value: object) -> bool:
    if isinstance(value, type):
        return issubclass(value, Callback) and value is not Callback
    return isinstance(value, Callback)


def _refuse_arguments(what: str, factory: Callable[..., Any]) -> None:
    try:
        parameters = signature(factory)
    except (TypeError, ValueError):
        return  # a built-in
    try:
        parameters.bind()
    except TypeError as error:
        raise UserError(
            f"{what}{parameters}: {error}; give it a default, or name a function without "
            "arguments that returns the callback"
        ) from None


def _refuse_methods(what: str, callback: Callback) -> None:
    """Raises `UserError` for a method whose name or parameters are those of no callback."""
    for name in dir(type(callback)):
        method = getattr(callback, name, None)
        if not name.startswith("on_") or not callable(method):
            continue
        if name not in METHODS:
            raise UserError(f"{what}: no event calls {name}; {similar_names(name, list(METHODS))}")
        try:
            signature(method).bind(None)
        except TypeError:
            raise UserError(
                f"{what}: {name}{signature(method)} must take one argument, see "
                "pipelines.callbacks.Callback"
            ) from None


def _described(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__}"
