"""Copies of the controller's state."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import process_time
from typing import Any

from test_growth_rounds import grown_from, reshard

from elastic.geometry.layout import Layout
from elastic.protocol.wire import encode
from elastic.replay.state_copy import copy_state


@dataclass(frozen=True, slots=True)
class FrozenWithDict:
    """Frozen, but its content can change."""

    values: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrozenAround:
    inner: FrozenWithDict
    layout: Layout


def test_copy_does_not_follow_the_original() -> None:
    original = FrozenAround(FrozenWithDict({"a": [1]}), Layout())
    copied = copy_state(original)
    original.inner.values["a"].append(2)
    assert copied.inner.values == {"a": [1]}
    assert copied.layout is original.layout, "what nothing can change is shared"


def test_containers_are_copied_with_their_kinds() -> None:
    original: dict[str, Any] = {"q": deque([[1]], maxlen=3), "s": {1}, "t": ([1],), "l": [(1,)]}
    copied = copy_state(original)
    assert copied == original
    assert copied["q"].maxlen == 3
    for name in original:
        assert copied[name] is not original[name]
    original["t"][0].append(2)
    assert copied["t"] == ([1],)


def test_state_of_a_run_is_copied_whole_and_cheaply() -> None:
    run = grown_from(10)
    run.pause()
    state = run.core.state
    began = process_time()
    copied = copy_state(state)
    assert process_time() - began < 0.05
    before = encode(state)
    assert encode(copied) == before
    reshard(run)
    run.commit(3)
    assert encode(copied) == before, "it shares nothing that changes"
    assert encode(state) != before
