"""Variables in which a script counts, set back when a step comes again."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from inspect import currentframe
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipelines.loop.state.counted_iterators import shift_counts
from pipelines.loop.state.frame_locals import read_locals, set_locals
from pipelines.loop.state.reached_objects import MOST_PARTS, reached
from pipelines.settings.user_code import is_users

DEPTH = 4
"""How far objects and containers in them are followed, as to the wrapper of an optimizer."""
MOST_OBJECTS = 300
MOST_LOCAL = 128
"""So many objects are looked at in each step; the first of those that were made before the loop,
and of those that local variables have now. Those near the variables come first."""
CONTAINERS = (dict, defaultdict, OrderedDict, Counter, deque)
MOST_SUMS = 128
"""Larger tensors and arrays are not set back."""
PLAIN = (int, float, str, type(None), np.number)


class NotedFrame(NamedTuple):
    """A function that runs, which is not held: that would keep its variables."""

    frame: int
    variables: dict[str, Any]


class ScriptVariables:
    """Numbers, flags and texts of a script, and the lists and dictionaries that it adds to.

    They are the local variables of the functions that its loop is in, its global variables, items
    of dictionaries and attributes of objects of its own classes. The body of a step that fails has
    counted, and counts once more when the step comes again.
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
            found = filter(_holds, reached(values, DEPTH, _is_of_user))
            self._early = [*islice(found, MOST_OBJECTS)]
        self._places: list[NotedFrame] = []
        self._tables: list[tuple[dict[str, Any], set[str], dict[str, Any]]] = []
        """What holds variables, their names, and the values to which they are set back."""
        self._sizes: list[tuple[list[Any], int]] = []
        self._queues: list[tuple[deque[Any], tuple[Any, ...]]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._arrays: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def note(self) -> None:
        """The present step begins with what there is now. Called by the script's thread."""
        self.forget()
        values: list[Any] = []
        for frame in _frames_of_user(currentframe()):
            variables = read_locals(frame)
            noted = {name: value for name, value in variables.items() if _is_noted(value)}
            self._places.append(NotedFrame(id(frame), noted))
            values += variables.values()
            del variables
        found = reached(values, DEPTH, _is_of_user, MOST_LOCAL)
        held = [self._globals, *self._early, *filter(_holds, found)]
        for key, item in {id(item): item for item in held}.items():
            if key not in self._known:
                self._note(item)

    def forget(self) -> None:
        self._places.clear()
        for noted in (self._tables, self._sizes, self._queues, self._tensors, self._arrays):
            noted.clear()

    def restore(self) -> None:
        """Begin the present step again with what it began with. Called by the script's thread, by
        the generator of its steps."""
        shift_counts(_caller_of(currentframe()), -1)
        variables = {place.frame: place.variables for place in self._places}
        for frame in _frames_of_user(currentframe()):
            noted = variables.get(id(frame), {})
            if changed := _changed(read_locals(frame), noted):
                set_locals(frame, changed)
        for table, names, noted in self._tables:
            table.update(_changed(table, noted))
            for name in [] if table is self._globals else table.keys() - names:
                del table[name]
        for items, size in self._sizes:
            del items[size:]
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
            self._sizes.append((item, len(item)))
        elif isinstance(item, deque):
            self._queues.append((item, (*item,)))
        elif isinstance(item, Tensor):
            self._tensors.append((item, item.clone()))
        elif isinstance(item, np.ndarray):
            self._arrays.append((item, item.copy()))
        else:
            table = item if isinstance(item, dict) else vars(item)
            noted = {name: value for name, value in table.items() if _is_noted(value)}
            self._tables.append((table, {*table}, noted))


def _changed(present: dict[str, Any], noted: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in noted.items() if k in present and present[k] is not v}


def _caller_of(frame: FrameType | None) -> FrameType | None:
    return frame.f_back if frame else None


def _frames_of_user(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _is_noted(value: Any) -> bool:
    """Whether a variable is set back to this value: it is small, and does not change itself, or as
    a tensor is set back, too."""
    return isinstance(value, PLAIN) or _is_sum(value)


def _holds(value: Any) -> bool:
    """Whether a script may count in it."""
    match value:
        case list():
            return type(value) is list
        case dict() | deque():  # a subclass may refuse changes
            return type(value) in CONTAINERS and len(value) <= MOST_PARTS
    return _is_sum(value) or _is_of_user(value)


def _is_sum(value: Any) -> bool:
    """Whether it may be a sum to which the script adds in place, or a table of some, such as a
    confusion matrix."""
    if type(value) is np.ndarray:
        return value.size <= MOST_SUMS and value.flags.writeable
    is_small = type(value) is Tensor and value.numel() <= MOST_SUMS
    return is_small and not value.requires_grad and not value.is_inference()


def _is_of_user(value: Any) -> bool:
    """Whether it has attributes and its class is the user's; modules are part of the run's state,
    and a dataset may be read by other threads."""
    if isinstance(value, type | nn.Module | Tensor | Dataset) or not hasattr(value, "__dict__"):
        return False
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return bool(file) and is_users(str(file))
