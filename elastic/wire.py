"""Events, commands and state as JSON: the journal's lines, and back."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from math import inf
from typing import Any, Union, get_args, get_origin, get_type_hints

from elastic.commands import Command
from elastic.errors import ElasticError
from elastic.events import Event, StepCommitted
from elastic.finite import finite
from elastic.state import CoreState
from elastic.unfinished import Unfinished
from elastic.votes import StepRecord, Vote

FORMAT = 3
"""The journal's format; a reader refuses any other."""


_FIELDS = [field.name for field in fields(StepRecord)]
_STEP, _STEP_S = _FIELDS.index("step"), _FIELDS.index("step_s")


class UnreadableJournal(ElasticError):
    """A journal line is of another format or of no known kind."""


def encode(value: Any, is_sparse: bool = False) -> Any:
    """A JSON value; a dataclass becomes an object whose `is` names its class, and a number that is
    not finite becomes null.

    If `is_sparse`, fields that have their default value are left out.
    """
    if is_dataclass(value) and not isinstance(value, type):
        defaults = _defaults(type(value)) if is_sparse else {}
        body: dict[str, Any] = {"is": type(value).__name__}
        for name in _names(type(value)):
            item = getattr(value, name)
            if name not in defaults or item != defaults[name]:
                body[name] = encode(item, is_sparse)
        return body
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, tuple | list | deque):
        return [encode(item, is_sparse) for item in value]
    if isinstance(value, dict):
        return {key: encode(item, is_sparse) for key, item in value.items()}
    if isinstance(value, float):
        return finite(value)
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
    if origin in (list, set, frozenset, deque):
        return origin(decode(parameters[0], item) for item in value)
    if origin is dict:
        return {key: decode(parameters[1], item) for key, item in value.items()}
    if kind is float and value is None:
        return inf  # a deadline that never comes
    return value


def event_line(now: float, event: Event, state: CoreState) -> dict[str, Any]:
    """An event as one journal line."""
    return _line(now, "event", event, state)


def command_line(now: float, command: Command, state: CoreState) -> dict[str, Any]:
    """A command as one journal line."""
    return _line(now, "command", command, state)


def steps_line(steps: Sequence[tuple[float, StepCommitted]]) -> dict[str, Any]:
    """Reports of committed steps as one journal line; each has the time of the controller."""
    now, last = steps[-1]
    rows = [
        [time, event.generation, _values(event.record), _values(event.vote)]
        for time, event in steps
    ]
    return {"time": now, "generation": last.generation, "steps": rows, "format": FORMAT}


def is_steps(line: Mapping[str, Any]) -> bool:
    """Whether a line is one of `steps_line`."""
    return "steps" in line and not line.keys() & {"event", "command"}


def steps_of(line: dict[str, Any]) -> Iterator[tuple[float, StepCommitted]]:
    """The inverse of `steps_line`. Raises `UnreadableJournal` for another format."""
    _check_format(line)
    for now, generation, record, vote in line["steps"]:
        yield now, StepCommitted(generation, StepRecord(*record), Vote(*vote))


def steps_in(line: Mapping[str, Any]) -> Iterator[tuple[float, int, int, float]]:
    """For readers: of each step in such a line its time, generation, number and `step_s`."""
    for now, generation, record, _ in line["steps"]:
        yield now, generation, record[_STEP], record[_STEP_S]


def state_line(
    now: float,
    state: CoreState,
    unfinished: Unfinished | None = None,
    lacking: Iterable[dict[str, Any]] = (),
    compute_s: tuple[float, ...] = (),
) -> dict[str, Any]:
    """The core's whole state as one journal line, from which a replay may begin; what has its
    default value is left out.

    `lacking` are the newest lines of metrics, which storage may not have; `compute_s` is of the
    newest `ComputeTimed`, for readers.
    """
    return {
        "time": now,
        "generation": state.generation,
        "step": state.committed_step,
        "CoreState": encode(state, is_sparse=True),
        "unfinished": encode(unfinished or Unfinished(), is_sparse=True),
        "lacking": list(lacking),
        "compute_s": list(compute_s),
        "format": FORMAT,
    }


def opening_line(now: float) -> dict[str, Any]:
    """What a controller writes before it replays a journal: it tells a replay nothing."""
    return {"time": now, "format": FORMAT}


def is_opening(line: Mapping[str, Any]) -> bool:
    """Whether a line is one of `opening_line`: it reports nothing, and has an older line's time."""
    return line.keys() <= {"time", "format", "epoch"}


def progress_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """What stands for a line of steps, or a full state, where no replay needs it any more."""
    step = line["steps"][-1][2][_STEP] if is_steps(line) else line["step"]
    generation = line["generation"]
    return {"time": line["time"], "generation": generation, "step": step, "format": FORMAT}


def is_progress(line: Mapping[str, Any]) -> bool:
    """Whether a line says only how far the run had come: `progress_line`, or a full state."""
    return "step" in line and not line.keys() & {"event", "command", "warning"}


def unfinished_of(line: dict[str, Any]) -> Unfinished:
    """What a full state line has beside the state."""
    unfinished: Unfinished = decode(Unfinished, line["unfinished"])
    return unfinished


def lacking_of(line: dict[str, Any]) -> list[StepRecord]:
    return [decode(StepRecord, row) for row in line["lacking"]]


def replayed(line: dict[str, Any]) -> Event | CoreState | None:
    """What a journal line tells a fresh core; commands tell it nothing.

    Raises `UnreadableJournal` if the line's format or kind is unknown.
    """
    _check_format(line)
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


def _check_format(line: dict[str, Any]) -> None:
    if line.get("format") != FORMAT:
        raise UnreadableJournal(f"journal format {line.get('format')!r}: this reads {FORMAT}")


def _values(value: StepRecord | Vote) -> list[Any]:
    return [encode(getattr(value, field.name)) for field in fields(value)]


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
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _defaults(kind: type) -> dict[str, Any]:
    """By field, of those that have a default; not to be changed."""
    defaults = {}
    for field in fields(kind):
        if field.default is not MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _event_kinds() -> dict[str, type]:
    return {kind.__name__: kind for kind in get_args(Event)}
