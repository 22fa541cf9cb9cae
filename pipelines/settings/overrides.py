"""Settings given on the command line, and their comparison with those of a stored run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any, NamedTuple, get_origin

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from pipelines.errors import UserError
from pipelines.settings.settings import RESUMABLE_SETTINGS, TrainSettings


class Given(NamedTuple):
    """A setting that has its own command-line option, such as `--steps 100`."""

    key: str
    text: str
    option: str


def override(settings: TrainSettings, changes: Iterable[str | Given]) -> TrainSettings:
    """The settings with each `key=value` applied, e.g. `optimizer.lr=3e-4`.

    If a key occurs several times, the last one counts. Raises `UserError` for an unknown key
    (naming similar ones), a value of the wrong type (naming the right one), or settings that
    contradict each other.
    """
    values = settings.model_dump()
    for change in changes:
        given = _given(change)
        _set(values, given.key.split("."), _value(settings, values, given))
    return settings_from(values, "--set")


def refuse_changes(changes: Iterable[str]) -> None:
    """Check what depends on no recipe: names and types of all settings but the model's. Raises
    `UserError`, before anything heavy is imported."""
    settings = TrainSettings()
    values = settings.model_dump()
    for change in changes:
        given = _given(change)
        if given.key.partition(".")[0] != "model":
            _value(settings, values, given)


def _given(change: str | Given) -> Given:
    if isinstance(change, Given):
        return change
    key, equals, text = change.partition("=")
    if not equals:
        raise UserError(f"--set {change}: write key=value, e.g. optimizer.lr=3e-4")
    return Given(key, text, "--set")


def _value(settings: TrainSettings, values: Mapping[str, Any], given: Given) -> Any:
    """The value of a change. Raises `UserError`."""
    known = list(_flat(values))
    if given.key not in known:
        similar = _similar_settings(given.key, known)
        raise UserError(f"--set {given.key}: there is no such setting; {similar}")
    return _parse(settings, given)


def settings_from(values: Mapping[str, Any], where: str) -> TrainSettings:
    """The settings in nested JSON values. Raises `UserError`, whose message begins with `where`."""
    try:
        return TrainSettings.model_validate(values)
    except ValidationError as error:
        separator = " " if _problems(error)[0]["loc"] else ": "
        raise UserError(f"{where}{separator}{first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """The first problem of a failed validation: the field, if there is one, and what is wrong."""
    problem = _problems(error)[0]
    key = ".".join(str(part) for part in problem["loc"])
    return ": ".join(filter(None, (key, _lowered(problem["msg"]))))


def differing_training_settings(old: TrainSettings, new: TrainSettings) -> list[str]:
    """Each training setting that differs, as `key: old -> new`."""
    before = _flat(old.model_dump(mode="json"))
    after = _flat(new.model_dump(mode="json"))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in before | after
        if key not in RESUMABLE_SETTINGS and before.get(key) != after.get(key)
    ]


def similar_names(name: str, known: Sequence[str]) -> str:
    """The end of an error message: the known names most similar to `name`, or all of them."""
    last = name.rpartition(".")[2]
    by_last = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = get_close_matches(name, known, n=3)
    close += [by_last[part] for part in get_close_matches(last, list(by_last), n=3)]
    if close:
        return "similar: " + ", ".join(dict.fromkeys(close))
    return "there are: " + ", ".join(known) if known else "there is none"


def _similar_settings(name: str, known: Sequence[str]) -> str:
    """As `similar_names`, but a group lists its settings, and a setting of another group comes
    before names that only look alike."""
    if members := [key for key in known if key.startswith(f"{name}.")]:
        return f"{name} is a group: " + ", ".join(members)
    moved = [key for key in known if _is_moved(name, key)]
    if moved:
        moved.sort(key=lambda key: -SequenceMatcher(None, name, key).ratio())
        return "similar: " + ", ".join(moved)
    return similar_names(name, known)


def _is_moved(name: str, known: str) -> bool:
    """Whether both are the same but for the group: `keep_last`, or `snapshot_every`."""
    has_same_end = name.rpartition(".")[2] == known.rpartition(".")[2]
    return has_same_end or name.replace(".", "_") == known.replace(".", "_")


def _parse(settings: Any, given: Given) -> Any:
    """The value that the text means for this setting."""
    text = given.text
    *path, last = given.key.split(".")
    for part in path:
        settings = settings[part] if isinstance(settings, dict) else getattr(settings, part)
    if isinstance(settings, dict):
        return _as_json(text)
    annotation = type(settings).model_fields[last].rebuild_annotation()
    value: str | list[str] | None = None if text.lower() in ("none", "null") else text
    if value is not None and get_origin(annotation) is tuple:
        value = text.split(",")
    try:
        return _adapter(annotation).validate_python(value)
    except ValidationError as error:
        reasons = (_lowered(problem["msg"]) for problem in _problems(error))
        key = f"{given.key}=" if given.option == "--set" else ""
        written = f"{given.option} {key}{text}"
        raise UserError(f"{written}: {'; '.join(dict.fromkeys(reasons))}") from None


def _problems(error: ValidationError) -> list[Any]:
    """The problems of a validation.

    For a union type pydantic lists those of every alternative. If the value has the form of one
    alternative, only that alternative's are returned.
    """
    problems = error.errors()
    return [problem for problem in problems if problem["type"] == "value_error"] or problems


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    """A validator for one field's type.

    A bare type lacks the models' configuration that numbers must be finite, so it is given here.
    A model has its own configuration and accepts no other.
    """
    try:
        return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
    except PydanticUserError:
        return TypeAdapter(annotation)


def _lowered(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _as_json(text: str) -> Any:
    """The JSON value that the text is, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        values = values[part]
    values[path[-1]] = value


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
