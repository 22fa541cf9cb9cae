"""`enumerate` over the steps of a loop: it gives each step its number, whatever has happened."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from inspect import CO_GENERATOR
from types import CodeType, FrameType, FunctionType, GeneratorType
from typing import Any, cast

from pipelines.loop.state.frame_locals import frames_of_user, read_locals


def shift_counts(frame: FrameType | None, by: int) -> None:
    """Let each `enumerate` that waits for the next step give it a larger or smaller number.

    It waits for one of the iterators that run, from that of `frame` up to the function with the
    loop, such as that of a progress bar. Nothing else can set it: its next number is its first
    field in CPython, which is compared with what it says of itself. This takes as long as a look at
    each object of the process. Does nothing if no function of the script names `enumerate`.
    """
    if not by or not any("enumerate" in code.co_names for code in _codes_of_user(frame)):
        return
    generators: list[FrameType] = []
    awaited: list[Any] = []
    while frame is not None:
        if frame.f_code.co_flags & CO_GENERATOR:
            generators.append(frame)
        elif frame.f_code.co_name == "__next__":
            awaited += [*read_locals(frame).values()][:1]
        else:
            break
        frame = frame.f_back
    # By type(), since some objects warn when they are asked for their class.
    known = [item for item in _objects() if type(item) in (enumerate, GeneratorType)]
    running = [item for item in known if type(item) is GeneratorType and item.gi_running]
    awaited += [item for item in running if any(item.gi_frame is own for own in generators)]
    for item in known:
        if type(item) is enumerate:
            iterator, number = cast("tuple[Any, int]", item.__reduce__()[1])
            field = ctypes.c_ssize_t.from_address(id(item) + object.__basicsize__)
            if field.value == number and any(iterator is own for own in awaited):
                field.value += by


def _codes_of_user(frame: FrameType | None) -> Iterator[CodeType]:
    """Those of the callers, and of the functions beside them."""
    for user_frame in frames_of_user(frame):
        yield user_frame.f_code
        for value in [*user_frame.f_globals.values()]:
            if type(value) is FunctionType:
                yield value.__code__


def _objects() -> list[Any]:
    """All objects of the process, also those that the worker has frozen after its warm-up."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()
