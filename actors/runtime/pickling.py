"""A check that the objects sent to workers can be pickled, before any process is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import cloudpickle


class _NullFile:
    """A file that discards its bytes."""

    def write(self, data: Any) -> int:
        return len(data)


def why_unpicklable(value: object) -> str | None:
    """Why a value cannot be pickled, in one line; None if it can.

    It is pickled as Ray does it; the result is discarded, and large buffers are not copied.
    """
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


def _ignore(buffer: object) -> None:
    """Returning a false value keeps the buffer out of the stream."""
