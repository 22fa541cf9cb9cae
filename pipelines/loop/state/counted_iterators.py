"""`enumerate` over the steps of a loop: it gives each step its number, whatever has happened."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from inspect import CO_GENERATOR
from types import CodeType, FrameType, GeneratorType
from typing import Any, cast


def shift_counts(frame: FrameType | None, by: int) -> None:
    """Let each `enumerate` that waits for the next step give it a larger or smaller number.

    It waits for one of the generators that run, from that of `frame` up to the function with the
    loop, such as that of a progress bar. Nothing else can set it: its next number is its first
    field in CPython, which is compared with what it says of itself. This takes as long as a look at
    each object of the process. Does nothing if none of the callers names `enumerate`.
    """
    if not by:
        return
    frames: list[FrameType] = []
    while frame is not None and frame.f_code.co_flags & CO_GENERATOR:
        frames.append(frame)
        frame = frame.f_back
    if not any("enumerate" in code.co_names for code in _codes(frames[0] if frames else frame)):
        return
    # By type(), since some objects warn when they are asked for their class.
    known = [item for item in _objects() if type(item) in (enumerate, GeneratorType)]
    running = [item for item in known if type(item) is GeneratorType and item.gi_running]
    awaited = [item for item in running if any(item.gi_frame is own for own in frames)]
    for item in known:
        if type(item) is enumerate:
            iterator, number = cast("tuple[Any, int]", item.__reduce__()[1])
            field = ctypes.c_ssize_t.from_address(id(item) + object.__basicsize__)
            if field.value == number and any(iterator is own for own in awaited):
                field.value += by


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _objects() -> list[Any]:
    """All objects of the process, also those that the worker has frozen after its warm-up."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()
