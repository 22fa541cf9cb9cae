"""A DeepSpeed configuration: its keys with their full names, and one report line for each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.errors import UserError

LARGEST = 1e300
"""A whole number beyond the range of floats would raise in arithmetic."""
AUTO = "auto"
"""The value that Hugging Face's `Trainer` replaces by one of its own arguments."""
AUTO_LINE = (
    "no value: Hugging Face's Trainer fills `auto` in from TrainingArguments; "
    "docs/from-hf-trainer.md lists the setting of each"
)


class Configuration:
    """The keys of a configuration by full name, such as `zero_optimization.stage`.

    Values are read by type. Each key gets one line in `lines`, so that none is dropped silently.
    """

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.values: dict[str, Any] = {}
        for key, value in _leaves(values):
            if key in self.values:
                raise UserError(f"{name}: the key {key} occurs nested and with a dot: remove one")
            self.values[key] = value
        self.lines: dict[str, str] = {}

    def report(self, key: str, line: str) -> None:
        """Say what became of a key, unless an earlier line says so or the file lacks the key."""
        if key in self.values:
            self.lines.setdefault(key, line)

    def report_absent(self, key: str, line: str) -> None:
        """Say what DeepSpeed does without a key, and how that is translated."""
        self.lines[f"{key} (absent)"] = line

    def has(self, key: str) -> bool:
        """Whether the file has a value for this key that is neither `auto` nor null."""
        value = self.values.get(key)
        if value == AUTO:
            self.lines[key] = AUTO_LINE
        return value is not None and value != AUTO

    def whole(self, key: str) -> int | None:
        """A whole number; JSON may write it as 5e8. Raises `UserError`."""
        number = self.number(key)
        if number is not None and number != int(number):
            raise self.mistake(key, "must be a whole number")
        return None if number is None else int(number)

    def positive(self, key: str) -> int | None:
        """A whole number of at least 1. Raises `UserError`."""
        number = self.whole(key)
        if number is not None and number < 1:
            raise self.mistake(key, "must be at least 1")
        return number

    def number(self, key: str) -> float | None:
        """A finite number. Raises `UserError`."""
        if not self.has(key):
            return None
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.mistake(key, "must be a number")
        if not abs(value) <= LARGEST:
            raise self.mistake(key, f"must be finite, at most {LARGEST:g}")
        return value

    def flag(self, key: str) -> bool:
        """True or false; false if the key is absent. Raises `UserError`."""
        if not self.has(key):
            return False
        value = self.values[key]
        if not isinstance(value, bool):
            raise self.mistake(key, "must be true or false")
        return value

    def text(self, key: str) -> str | None:
        """A word. Raises `UserError`."""
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, str):
            raise self.mistake(key, "must be a string")
        return value

    def is_enabled(self, block: str) -> bool:
        """Whether a block such as `bf16` is switched on; without `enabled` it is not."""
        return self.flag(f"{block}.enabled")

    def below(self, block: str) -> list[str]:
        """The full names of the keys of a block."""
        return [key for key in self.values if key.startswith(f"{block}.")]

    def mistake(self, key: str, problem: str) -> UserError:
        """The error for a value, with its place in the file."""
        return UserError(f"{self.name}: {key}={json.dumps(self.values[key])} {problem}")


def read_configuration(file: Path) -> Configuration:
    """Read a JSON file as DeepSpeed does, which refuses duplicate keys. Raises `UserError`."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: there is no such file; give a DeepSpeed JSON file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{file}: cannot be read: {reason}") from None
    try:
        values = json.loads(text, object_pairs_hook=lambda pairs: _unique(file, pairs))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{file}: not JSON at {place}: {error.msg}") from None
    except ValueError as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    except RecursionError:
        raise UserError(f"{file}: nested too deeply for a DeepSpeed configuration") from None
    if not isinstance(values, dict) or not values:
        raise UserError(f"{file}: must be a JSON object with keys, such as train_batch_size")
    return Configuration(file.name, values)


def _unique(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise UserError(f"{file}: the key {key} occurs twice in one object: remove one")
        values[key] = value
    return values


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that is no object with keys, by its full name."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
