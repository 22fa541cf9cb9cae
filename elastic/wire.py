"""Events, commands and state as JSON: the journal's lines, and back."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from elastic.commands import Command
from elastic.errors import ElasticError
from elastic.events import Event
from elastic.state import CoreState

FORMAT = 2
"""The journal's format; a reader refuses any other."""


class UnreadableJournal(ElasticError):
    """A journal line is of another format or of no known kind."""


def encode(value: Any) -> Any:
    """A JSON value; a dataclass becomes an object whose `is` names its class."""
    if is_dataclass(value) and not isinstance(value, type):
        body = {f.name: encode(getattr(value, f.name)) for f in fields(value)}
        return {"is": type(value).__name__, **body}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(kind: Any, value: Any) -> Any:
    """The inverse of `encode`, told what type is wanted."""
    origin, parameters = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(parameters, value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{k: decode(hints[k], v) for k, v in value.items() if k in hints})
    if origin is tuple:
        variadic = len(parameters) == 2 and parameters[1] is Ellipsis
        kinds = [parameters[0]] * len(value) if variadic else parameters
        return tuple(decode(k, v) for k, v in zip(kinds, value, strict=True))
    if origin in (list, set, frozenset):
        return origin(decode(parameters[0], item) for item in value)
    if origin is dict:
        return {key: decode(parameters[1], item) for key, item in value.items()}
    return value


def event_line(now: float, event: Event, state: CoreState) -> dict[str, Any]:
    """An event as one journal line."""
    return _line(now, "event", event, state)


def command_line(now: float, command: Command, state: CoreState) -> dict[str, Any]:
    """A command as one journal line."""
    return _line(now, "command", command, state)


def state_line(now: float, state: CoreState) -> dict[str, Any]:
    """The core's whole state as one journal line, from which a replay may begin."""
    return {"time": now, "CoreState": encode(state), "format": FORMAT}


def replayed(line: dict[str, Any]) -> Event | CoreState | None:
    """What a journal line tells a fresh core; commands tell it nothing.

    Raises `UnreadableJournal` if the line's format or kind is unknown.
    """
    if line.get("format") != FORMAT:
        raise UnreadableJournal(f"journal format {line.get('format')!r}: this reads {FORMAT}")
    if "CoreState" in line:
        state: CoreState = decode(CoreState, line["CoreState"])
        return state
    if "event" not in line:
        return None
    kind = _event_kinds().get(line["event"])
    if kind is None:
        raise UnreadableJournal(f"journal line of an unknown event {line['event']!r}")
    event: Event = decode(kind, line)
    return event


def _line(now: float, role: str, told: Event | Command, state: CoreState) -> dict[str, Any]:
    body = encode(told)
    head = {"time": now, role: body.pop("is"), "generation": state.generation}
    return {**head, **body, "format": FORMAT}


def _decode_union(parameters: tuple[Any, ...], value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, dict) and "is" in value:
        for kind in parameters:
            if getattr(kind, "__name__", "") == value["is"]:
                return decode(kind, value)
        raise UnreadableJournal(f"{value['is']!r} is none of {parameters}")
    plain = [kind for kind in parameters if kind is not type(None)]
    return decode(plain[0], value)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _event_kinds() -> dict[str, type]:
    return {kind.__name__: kind for kind in get_args(Event)}
