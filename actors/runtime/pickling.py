"""Whether what a run sends to its workers can be sent, before any process is started for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import cloudpickle


class _Nowhere:
    """Takes bytes and keeps none."""

    def write(self, data: Any) -> int:
        return len(data)


def why_unpicklable(value: object) -> str | None:
    """Why a value cannot be sent to another process, in one line; None if it can be.

    It is pickled as Ray does it; nothing is kept, and large buffers are not copied.
    """
    try:
        cloudpickle.Pickler(_Nowhere(), protocol=5, buffer_callback=_ignore).dump(value)
    except Exception as error:
        told = " ".join(str(error).split()) or "it gives no reason"
        return f"{type(error).__name__}: {told}"
    return None


def first_unpicklable(parts: Mapping[str, object]) -> tuple[str, str] | None:
    """The first of these parts that cannot be sent, by its name, and why."""
    for name, part in parts.items():
        if why := why_unpicklable(part):
            return name, why
    return None


def _ignore(buffer: object) -> None:
    """A false answer leaves the buffer out of the stream."""
