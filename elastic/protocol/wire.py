"""Wire format: events, commands and controller state as JSON lines of the journal, and back."""

from __future__ import annotations

import json
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from math import inf, isfinite
from typing import Any, Union, get_args, get_origin, get_type_hints

from elastic.geometry.errors import ElasticError
from elastic.protocol.commands import Command
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Event, StepCommitted
from elastic.protocol.pending_commands import PendingCommands
from elastic.protocol.policy import Policy
from elastic.protocol.votes import SPLIT, StepRecord, Vote


def finite(value: float | None) -> float | None:
    """The value if it is finite, else None."""
    return value if value is not None and isfinite(value) else None


FORMAT = 7
"""The journal's format; a reader refuses any other."""

_FIELDS = [field.name for field in fields(StepRecord)]
_NUM_IN_JOURNAL = _FIELDS.index(SPLIT[0])
"""The time split and what a script reports, at the end of a record, are only in the metrics: they
decide nothing."""

_STEP, _STEP_S = _FIELDS.index("step"), _FIELDS.index("step_s")


_PLAIN = frozenset((str, int, bool, type(None)))
"""Types whose values are JSON as they are. Most values are of these, and a controller of a thousand
workers encodes many."""


class UnreadableJournal(ElasticError):
    """A journal line has another format or an unknown class."""


def encode(value: Any, is_sparse: bool = False) -> Any:
    """A value as JSON: a dataclass becomes an object whose `is` names its class, and a number that
    is not finite becomes null.

    If `is_sparse`, fields with their default value are omitted, and a policy, which has no
    defaults, becomes a short text.
    """
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, float):
        return finite(value)
    if is_sparse and kind is Policy:
        return _packed(value)
    if _is_record(kind):
        return _encode_record(value, kind, is_sparse)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, tuple | list | deque):
        return [item if type(item) in _PLAIN else encode(item, is_sparse) for item in value]
    if isinstance(value, dict):
        return {key: encode(item, is_sparse) for key, item in value.items()}
    return value


def _encode_record(value: Any, kind: type, is_sparse: bool) -> dict[str, Any]:
    """A dataclass as an object."""
    body: dict[str, Any] = {"is": kind.__name__}
    if not is_sparse:
        for name in _names(kind):
            item = getattr(value, name)
            body[name] = item if type(item) in _PLAIN else encode(item)
        return body
    defaults, hints = _defaults(kind), _hints(kind)
    for name in _names(kind):
        item = getattr(value, name)
        if name not in defaults or item != defaults[name]:
            body[name] = encode(item, is_sparse)
            if _names_one_record(hints[name]):
                _drop_class(body[name])
            elif _holds_one_record(hints[name]):
                for part in body[name].values() if isinstance(item, dict) else body[name]:
                    _drop_class(part)
    return body


def decode(kind: Any, value: Any) -> Any:
    """The inverse of `encode` for a value of type `kind`."""
    origin, parameters = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(parameters, value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        if isinstance(value, str):
            value = dict(zip(_names(kind), json.loads(f"[{value}]"), strict=True))
        return kind(**{k: decode(hints[k], v) for k, v in value.items() if k in hints})
    if origin is tuple:
        variadic = len(parameters) == 2 and parameters[1] is Ellipsis
        kinds = [parameters[0]] * len(value) if variadic else parameters
        return tuple(decode(k, v) for k, v in zip(kinds, value, strict=True))
    if origin in (list, set, frozenset, deque):
        return origin(decode(parameters[0], item) for item in value)
    if origin is dict:
        return {key: decode(parameters[1], item) for key, item in value.items()}
    if kind is bool:
        return bool(value)  # packed as 0 or 1
    if kind is float:
        return inf if value is None else float(value)  # null: a deadline that never comes
    return value


def event_line(now: float, event: Event, state: ControllerState) -> dict[str, Any]:
    """An event as one journal line."""
    return _line(now, "event", event, state)


def command_line(now: float, command: Command, state: ControllerState) -> dict[str, Any]:
    """A command as one journal line."""
    return _line(now, "command", command, state)


def steps_line(steps: Sequence[tuple[float, StepCommitted]]) -> dict[str, Any]:
    """Reports of committed steps as one journal line; each with the controller's time."""
    now, last = steps[-1]
    rows = [
        [time, event.generation, _values(event.record)[:_NUM_IN_JOURNAL], _values(event.vote)]
        for time, event in steps
    ]
    return {"time": now, "generation": last.generation, "steps": rows, "format": FORMAT}


def metrics_row(record: StepRecord) -> dict[str, Any]:
    """A record as a line of the metrics."""
    row: dict[str, Any] = asdict(record)
    if not row["reported"]:
        del row["reported"]
    return row


def is_steps(line: Mapping[str, Any]) -> bool:
    """Whether a line was made by `steps_line`."""
    return "steps" in line and not line.keys() & {"event", "command"}


def steps_of(line: dict[str, Any]) -> Iterator[tuple[float, StepCommitted]]:
    """The inverse of `steps_line`. Raises `UnreadableJournal` for another format."""
    check_format(line)
    for now, generation, record, vote in line["steps"]:
        yield now, StepCommitted(generation, StepRecord(*record), Vote(*vote))


def steps_in(line: Mapping[str, Any]) -> Iterator[tuple[float, int, int, float]]:
    """For readers: the time, generation, number and `step_s` of each step in such a line."""
    for now, generation, record, _ in line["steps"]:
        yield now, generation, record[_STEP], record[_STEP_S]


def state_line(
    now: float,
    state: ControllerState,
    unfinished: PendingCommands | None = None,
    lacking: Iterable[dict[str, Any]] = (),
    compute_s: tuple[float, ...] = (),
) -> dict[str, Any]:
    """The core's full state as one journal line, from which a replay may begin; default values are
    omitted.

    `lacking` are the newest metrics lines, which storage may not have yet. `compute_s` is that of
    the newest `ComputeTimed`, for readers.
    """
    return {
        "time": now,
        "generation": state.generation,
        "step": state.committed_step,
        "ControllerState": encode(state, is_sparse=True),
        "unfinished": encode(unfinished or PendingCommands(), is_sparse=True),
        "lacking": list(lacking),
        "compute_s": list(compute_s),
        "format": FORMAT,
    }


def opening_line(now: float) -> dict[str, Any]:
    """The line that a controller writes before it replays a journal; a replay ignores it."""
    return {"time": now, "format": FORMAT}


def is_opening(line: Mapping[str, Any]) -> bool:
    """Whether a line is one of `opening_line`: it reports nothing, and has an older line's time."""
    return line.keys() <= {"time", "format", "epoch"}


def progress_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """The short replacement for a line of steps, or a full state, that no replay needs any more."""
    step = line["steps"][-1][2][_STEP] if is_steps(line) else line["step"]
    generation = line["generation"]
    return {"time": line["time"], "generation": generation, "step": step, "format": FORMAT}


def is_progress(line: Mapping[str, Any]) -> bool:
    """Whether a line only says how far the run had got: `progress_line`, or a full state."""
    return "step" in line and not line.keys() & {"event", "command", "warning"}


def unfinished_of(line: dict[str, Any]) -> PendingCommands:
    """The pending commands of a full state line."""
    unfinished: PendingCommands = decode(PendingCommands, line["unfinished"])
    return unfinished


def lacking_of(line: dict[str, Any]) -> list[StepRecord]:
    """The newest metrics lines of a full state line."""
    return [decode(StepRecord, row) for row in line["lacking"]]


def replayed(line: dict[str, Any]) -> Event | ControllerState | None:
    """The event or full state of a journal line; None for a line that a replay ignores.

    Raises `UnreadableJournal` if the line has another format or an unknown event.
    """
    check_format(line)
    if "ControllerState" in line:
        state: ControllerState = decode(ControllerState, line["ControllerState"])
        return state
    if "event" not in line:
        return None
    kind = _event_kinds().get(line["event"])
    if kind is None:
        raise UnreadableJournal(f"the journal has an unknown event {line['event']!r}")
    event: Event = decode(kind, line)
    return event


def _packed(policy: Policy) -> str:
    """The values of a policy in the order of its fields; with their names they would be a third of
    a full state."""
    values = [encode(getattr(policy, name)) for name in _names(Policy)]
    short = [int(v) if _is_whole(v) else v for v in values]
    return json.dumps(short, separators=(",", ":"))[1:-1]


def _is_whole(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, float) and value.is_integer())


def _drop_class(body: Any) -> None:
    """Remove the class of a field's value, because the field's type says it."""
    if isinstance(body, dict):
        del body["is"]


def check_format(line: Mapping[str, Any]) -> None:
    """Raises `UnreadableJournal` if another version wrote the line."""
    if line.get("format") != FORMAT:
        raise UnreadableJournal(
            f"this run was written in journal format {line.get('format')!r}, this version reads "
            f"{FORMAT}: start a new run name (or use the version that wrote it)"
        )


def _values(value: StepRecord | Vote) -> list[Any]:
    return [encode(getattr(value, field.name)) for field in fields(value)]


def _line(now: float, role: str, value: Event | Command, state: ControllerState) -> dict[str, Any]:
    body = encode(value)
    if body.get("others") == []:  # almost every `PartWritten` of a small run
        del body["others"]
    head = {"time": now, role: body.pop("is"), "generation": state.generation}
    return {**head, **body, "format": FORMAT}


def _decode_union(parameters: tuple[Any, ...], value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, dict) and "is" in value:
        for kind in parameters:
            if getattr(kind, "__name__", "") == value["is"]:
                return decode(kind, value)
        names = ", ".join(getattr(kind, "__name__", str(kind)) for kind in parameters)
        raise UnreadableJournal(f"the journal has a {value['is']!r} where it must have: {names}")
    plain = [kind for kind in parameters if kind is not type(None)]
    return decode(plain[0], value)


@cache
def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


@cache
def _names_one_record(hint: Any) -> bool:
    """Whether a value with this hint is of one dataclass, or None."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    is_union = get_origin(hint) in (Union, types.UnionType)
    return _is_record(hint) or (is_union and len(kinds) == 1 and _is_record(kinds[0]))


@cache
def _holds_one_record(hint: Any) -> bool:
    """Whether the items of a list or tuple with this hint, or the values of a dict, are of one
    dataclass."""
    parameters = [part for part in get_args(hint) if part is not Ellipsis]
    is_container = get_origin(hint) in (list, tuple, dict)
    is_uniform = get_origin(hint) is not tuple or len(parameters) == 1
    return is_container and is_uniform and _names_one_record(parameters[-1])


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _defaults(kind: type) -> dict[str, Any]:
    """The default by field name, for fields that have one; callers must not change it."""
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
