"""Variables in which a script counts, set back when a step comes again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from inspect import currentframe
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.loop.state.frame_locals import frames_of_user, read_locals, set_locals
from pipelines.loop.state.reached_objects import MOST_PARTS, items_of, reached
from pipelines.loop.state.variable_tables import Table, table_of

DEPTH = 4
"""How far objects and containers in them are followed, as to the wrapper of an optimizer."""
MOST_OBJECTS = 300
MOST_LOCAL = 128
"""So many objects are looked at in each step; the first of those that were made before the loop,
and of those that local variables have now. Those near the variables come first."""
MOST_SUMS = 128
"""Larger tensors and arrays are not set back."""
PLAIN = (int, float, str, type(None), np.number)


class NotedFrame(NamedTuple):
    """A function that runs, which is not held: that would keep its variables."""

    frame: int
    variables: dict[str, Any]


class NotedTable(NamedTuple):
    """A table of variables, their names, and the values to which some are set back."""

    table: Table
    names: Set[Any]
    variables: dict[Any, Any]


class NotedList(NamedTuple):
    """A list, its length, and its items if they are set back, too."""

    items: list[Any]
    size: int
    parts: tuple[Any, ...] | None


class ScriptVariables:
    """Numbers, flags and texts of a script, and the lists and dictionaries that it adds to.

    They are the local variables of the functions that its loop is in, its global variables, items
    of dictionaries and attributes of objects of its own classes, and what else `table_of` names.
    The body of a step that fails has counted, and counts once more when the step comes again.
    """

    def __init__(self, script: FrameType | None, known: Iterable[Any] = ()) -> None:
        """`script` is the frame of the script's function, in front of its loop. The run itself
        takes care of what is `known`, such as the buffers of the models."""
        self._known = {id(item) for item in known}
        self._globals: dict[str, Any] = {}
        self._early: list[Any] = []
        """What was made before the loop."""
        if script is not None:
            self._globals = script.f_globals
            values = [*read_locals(script).values(), *script.f_globals.values()]
            self._early = [*islice(filter(_holds, reached(values, DEPTH, _parts_of)), MOST_OBJECTS)]
        self._frames: list[NotedFrame] = []
        self._tables: list[NotedTable] = []
        self._lists: list[NotedList] = []
        self._queues: list[tuple[deque[Any], tuple[Any, ...]]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._arrays: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def note(self) -> None:
        """The present step begins with what there is now. Called by the script's thread."""
        self.forget()
        values: list[Any] = []
        for frame in frames_of_user(currentframe()):
            variables = read_locals(frame)
            self._frames.append(NotedFrame(id(frame), _noted_in(variables)))
            values += variables.values()
            del variables
        late = filter(_holds, reached(values, DEPTH, _parts_of, MOST_LOCAL))
        held = {id(item): item for item in (*self._early, *late)}
        own = self._globals  # those that are new stay
        self._tables.append(NotedTable(own, own.keys(), _noted_in(own)))
        for key, item in held.items():
            if key not in self._known:
                self._note(item)

    def forget(self) -> None:
        self._frames.clear()
        for noted in (self._tables, self._lists, self._queues, self._tensors, self._arrays):
            noted.clear()

    def restore(self) -> None:
        """Begin the present step again with what it began with. Called by the script's thread."""
        variables = {noted.frame: noted.variables for noted in self._frames}
        for frame in frames_of_user(currentframe()):
            noted = variables.get(id(frame), {})
            if changed := _changed(read_locals(frame), noted):
                set_locals(frame, changed)
        for table, names, noted in self._tables:
            table.update(_changed(table, noted))
            for name in table.keys() - names:
                del table[name]
        for items, size, parts in self._lists:
            del items[size:]
            if parts is not None:
                items[:] = parts
        for queue, parts in self._queues:
            queue.clear()
            queue.extend(parts)
        with torch.no_grad():
            for tensor, value in self._tensors:
                if tensor.shape == value.shape and not torch.equal(tensor, value):
                    tensor.copy_(value)
        for array, values in self._arrays:
            if array.shape == values.shape:
                array[...] = values

    def _note(self, item: Any) -> None:
        if isinstance(item, list):
            parts = (*item,) if _is_plain(item) else None
            self._lists.append(NotedList(item, len(item), parts))
        elif isinstance(item, deque):
            self._queues.append((item, (*item,)))
        elif isinstance(item, Tensor):
            self._tensors.append((item, item.clone()))
        elif isinstance(item, np.ndarray):
            self._arrays.append((item, item.copy()))
        elif (table := table_of(item)) is not None:
            self._tables.append(NotedTable(table, {*table}, _noted_in(table)))


def _noted_in(table: Table) -> dict[Any, Any]:
    """The variables with values that are small, and do not change themselves or are set back."""
    return {
        name: value
        for name, value in table.items()
        if isinstance(value, PLAIN) or _is_sum(value) or _is_plain(value)
    }


def _changed(present: Table, noted: dict[Any, Any]) -> dict[Any, Any]:
    return {k: v for k, v in noted.items() if k in present and present[k] is not v}


def _parts_of(value: Any) -> list[Any]:
    """What a script may count in of an object's attributes, or of a container's items."""
    table = table_of(value)
    parts = items_of(value) if table is None else islice(table.values(), MOST_PARTS)
    return [part for part in parts if not isinstance(part, PLAIN)]


def _holds(value: Any) -> bool:
    """Whether a script may count in it."""
    if isinstance(value, deque):
        return type(value) is deque and len(value) <= MOST_PARTS
    return type(value) is list or _is_sum(value) or table_of(value) is not None


def _is_plain(value: Any) -> bool:
    """Whether it is a short list or tuple of numbers and texts."""
    is_short = type(value) in (list, tuple) and len(value) <= MOST_PARTS
    return is_short and all(isinstance(part, PLAIN) for part in value)


def _is_sum(value: Any) -> bool:
    """Whether it may be a sum to which the script adds in place, or a table of some, such as a
    confusion matrix."""
    if type(value) is np.ndarray:
        return value.size <= MOST_SUMS and value.flags.writeable
    is_small = type(value) is Tensor and value.numel() <= MOST_SUMS
    return is_small and not value.requires_grad and not value.is_inference()
