"""Settings changed from the command line, and compared with those of a stored run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, get_origin

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from pipelines.settings.errors import UserError
from pipelines.settings.settings import TrainSettings

WHERE_AND_HOW = frozenset(
    {
        "steps",
        "eval_every",
        "eval_samples",
        "checkpoint_every",
        "keep_last",
        "keep_every",
        "keep_best",
        "snapshot_every",
        "snapshot_redundancy",
        "max_skipped",
        "spike_factor",
        "spike_window",
        "audit_every",
        "audit_rollback",
        "statistics_every",
        "start_timeout_s",
        "form_timeout_s",
        "form_timeout_per_worker_s",
        "form_factor",
        "reshard_timeout_s",
        "first_step_timeout_s",
        "hang_timeout_s",
        "hang_factor",
        "hang_share",
        "max_attempts",
        "quiesce_deadline_s",
        "quiesce_deadline_cuda_s",
        "quiesce_factor",
        "collective_timeout_s",
        "records_timeout_s",
        "snapshot_server_timeout_s",
        "save_timeout_s",
        "save_backoff_s",
        "driver_timeout_s",
        "orphan_timeout_s",
        "silence_timeout_s",
        "growth_horizon_s",
        "standby_timeout_s",
        "gang_timeout_s",
        "straggler_every",
        "straggler_factor",
        "straggler_reports",
        "quarantine_after",
        "crash_window_s",
        "quarantine_s",
        "quarantine_patience_s",
        "activation_checkpointing",
        "compile",
        "record_samples",
        "schedule",
        "reshard_after_forward",
        "sync_each_microbatch",
        "offload",
        "accelerator",
        "notify_after_s",
        "cache",
        "network",
    }
)
"""The fields that may change when a run is resumed, with all in them; others define the maths."""


class Given(NamedTuple):
    """A setting that an option of its own gives, such as `--steps 100`."""

    key: str
    text: str
    option: str


def override(settings: TrainSettings, changes: Iterable[str | Given]) -> TrainSettings:
    """The settings with each `key=value` set, e.g. `optimizer.lr=3e-4`; the last of a key counts.

    Raises `UserError` for an unknown key (naming the near ones), a value that does not fit
    (naming the type wanted), or settings that contradict each other.
    """
    values = settings.model_dump()
    known = list(_flat(values))
    for change in changes:
        if isinstance(change, Given):
            key, text, told = change.key, change.text, f"{change.option} {change.text}"
        else:
            key, equals, text = change.partition("=")
            told = f"--set {change}"
            if not equals:
                raise UserError(f"--set {change}: write key=value, e.g. optimizer.lr=3e-4")
        if key not in known:
            raise UserError(f"--set {key}: there is no such setting; {near(key, known)}")
        _set(values, key.split("."), _typed(settings, key, text, told))
    return settings_from(values, "--set")


def settings_from(values: Mapping[str, Any], where: str) -> TrainSettings:
    """The settings that nested JSON says. Raises `UserError`, which names `where` they stand."""
    try:
        return TrainSettings.model_validate(values)
    except ValidationError as error:
        separator = " " if _problems(error)[0]["loc"] else ": "
        raise UserError(f"{where}{separator}{first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """The first of a validation's complaints: the field, if there is one, and what is wrong."""
    problem = _problems(error)[0]
    key = ".".join(str(part) for part in problem["loc"])
    return ": ".join(filter(None, (key, _lowered(problem["msg"]))))


def differing_training_settings(old: TrainSettings, new: TrainSettings) -> list[str]:
    """Each field that defines the maths and differs, as `key: old -> new`."""
    before = _flat(old.model_dump(mode="json"))
    after = _flat(new.model_dump(mode="json"))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in before | after
        if key.partition(".")[0] not in WHERE_AND_HOW and before.get(key) != after.get(key)
    ]


def near(name: str, known: Sequence[str]) -> str:
    """The known names most like this one, or all of them, as the end of an error message."""
    last = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = get_close_matches(name, known, n=3)
    close += [last[part] for part in get_close_matches(name.rpartition(".")[2], list(last), n=3)]
    if close:
        return "near it: " + ", ".join(dict.fromkeys(close))
    return "there are: " + ", ".join(known) if known else "there is none"


def _typed(settings: Any, key: str, text: str, told: str) -> Any:
    *path, last = key.split(".")
    for part in path:
        settings = settings[part] if isinstance(settings, dict) else getattr(settings, part)
    if isinstance(settings, dict):
        return _as_json(text)
    annotation = type(settings).model_fields[last].rebuild_annotation()
    value = None if text.lower() in ("none", "null") else text
    if value is not None and get_origin(annotation) is tuple:
        value = text.split(",")
    try:
        return _adapter(annotation).validate_python(value)
    except ValidationError as error:
        wanted = "; ".join(dict.fromkeys(_lowered(problem["msg"]) for problem in _problems(error)))
        raise UserError(f"{told}: {wanted}") from None


def _problems(error: ValidationError) -> list[Any]:
    """What is wrong; of a type with alternatives only that of the one whose form the value has."""
    problems = error.errors()
    return [each for each in problems if each["type"] == "value_error"] or problems


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    """The finiteness of numbers is the models' own configuration, which a bare type lacks; and a
    model brings its own, and takes no other."""
    try:
        return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
    except PydanticUserError:
        return TypeAdapter(annotation)


def _lowered(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _as_json(text: str) -> Any:
    """What stands in a file of JSON; a word is itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        values = values[part]
    values[path[-1]] = value


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
