"""What cannot be pickled for the workers is named as a program names it."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
from ray import cloudpickle

from actors.runtime.pickling import unpicklable_variable, why_unpicklable
from pipelines.settings.user_code import short_traceback


class Logger:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def make(value: Any) -> Any:
    """A function that uses a value of the function around it."""

    def train() -> Any:
        return value

    return train


def make_with_default() -> Any:
    lock = threading.Lock()

    def helper() -> Any:
        return lock

    return make(helper)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (make(threading.Lock()), "value"),
        (make({"a": [1, threading.Lock()]}), "value['a'][1]"),
        (make(Logger()), "value.lock"),
        (make(open(__file__, "rb")), "value"),  # noqa: SIM115
        (make_with_default(), "lock"),
    ],
)
def test_variable_that_cannot_be_pickled_is_named(function: Any, name: str) -> None:
    assert why_unpicklable(function) is not None
    found = unpicklable_variable(function)
    assert found is not None and found[0] == name


def test_special_modules_are_pickled_by_name() -> None:
    backend = torch.backends.cudnn
    function = make([backend, torch.backends])
    assert why_unpicklable(function) is None
    assert pickle.loads(cloudpickle.dumps(function))()[0] is backend


def test_short_traceback_begins_with_the_first_frame_of_the_user() -> None:
    import_frame = f'  File "{pickle.__file__}", line 1, in load\n    load()\n'
    frames = [import_frame, '  File "/home/me/train.py", line 7, in train\n    f()\n', import_frame]
    head, end = "Traceback (most recent call last):\n", "KeyError: 3\n"
    whole = head + "".join(frames) + end
    assert short_traceback(whole) == head + "".join(frames[1:]) + end
    assert short_traceback(head + import_frame + end) == head + import_frame + end
