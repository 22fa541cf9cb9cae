"""Functions that run, and their local variables, read and set from outside."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

from pipelines.settings.user_code import is_users

IS_WRITTEN_THROUGH = sys.version_info >= (3, 13)
"""Whether `frame.f_locals` is the variables themselves (PEP 667), not a copy of them."""


def caller_of(frame: FrameType | None) -> FrameType | None:
    """In a function of its own: a frame whose variable is the frame itself is freed late."""
    return frame.f_back if frame else None


def frames_of_user(frame: FrameType | None) -> Iterator[FrameType]:
    """Those of the frame and its callers that run the user's code."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def read_locals(frame: FrameType) -> dict[str, Any]:
    """The local variables of a function; of other code none, as its variables are global or a
    class's."""
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        return {}
    variables = frame.f_locals
    try:
        return dict(variables)
    finally:
        _forget(variables)


def set_locals(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Set variables that `read_locals` has returned."""
    variables = frame.f_locals
    variables.update(values)
    if not IS_WRITTEN_THROUGH:  # what debuggers do
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    _forget(variables)


def _forget(variables: Any) -> None:
    """A copy would keep each value, such as the logits of a batch, until it is made again."""
    if not IS_WRITTEN_THROUGH:
        variables.clear()
