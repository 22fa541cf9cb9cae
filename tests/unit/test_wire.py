"""Events, commands and the whole state of the core can be read back from journal lines."""

from __future__ import annotations

import json
import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.protocol.commands import Command, Resume
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Event, StepCommitted, Woke, WorkerReady
from elastic.protocol.phases import Ended, Phase
from elastic.protocol.wire import (
    FORMAT,
    UnreadableJournal,
    command_line,
    decode,
    encode,
    event_line,
    replayed,
    state_line,
)
from elastic.reshard.reshard_plan import ReshardPlan

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
workers = st.lists(names, unique=True, min_size=1, max_size=4)


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    members = draw(workers)
    layout = Layout(dp=len(members), zero=draw(st.integers(0, 3)))
    return Assignment(draw(st.integers(0, 9)), layout, tuple(members), draw(st.just(("standby",))))


@st.composite
def reshard_plans(draw: st.DrawFn) -> ReshardPlan:
    old = draw(st.none() | assignments())
    holders = draw(st.lists(st.sampled_from(old.members), unique=True)) if old else []
    return ReshardPlan(draw(st.integers(0, 9)), 5, old, draw(assignments()), tuple(holders))


STRATEGIES = {
    Assignment: assignments(),
    ReshardPlan: reshard_plans(),
    int: st.integers(-(2**53), 2**53),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: names,
    bool: st.booleans(),
    type(None): st.none(),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type hint."""
    if kind in STRATEGIES:
        return STRATEGIES[kind]
    origin, parameters = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(parameters)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values_of, parameters))
    if origin is tuple and parameters[1:] == (Ellipsis,):
        return st.lists(values_of(parameters[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, parameters))
    if origin is list:
        return st.lists(values_of(parameters[0]), max_size=3)
    if origin is set:
        return st.sets(values_of(parameters[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(names, values_of(parameters[1]), max_size=3)
    assert is_dataclass(kind), f"no values of {kind}"
    if kind is Layout:
        return st.builds(Layout, dp=st.integers(1, 4), zero=st.integers(0, 3))
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: values_of(hints[field.name]) for field in fields(kind)})


def through_json(value: Any) -> Any:
    """The value after a round trip through strict JSON."""
    return json.loads(json.dumps(value, allow_nan=False))


QUICK = settings(max_examples=12, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__name__)
def test_event_line_is_read_back(kind: type) -> None:
    @QUICK
    @given(values_of(kind))
    def check(event: Event) -> None:
        line = through_json(event_line(12.5, event, ControllerState(generation=7)))
        assert replayed(line) == event
        assert (line["event"], line["time"], line["format"]) == (kind.__name__, 12.5, FORMAT)
        assert line["generation"] == getattr(event, "generation", 7)

    check()


@pytest.mark.parametrize("kind", get_args(Command), ids=lambda kind: kind.__name__)
def test_command_line_contains_the_command_and_is_ignored_by_a_replay(kind: type) -> None:
    @QUICK
    @given(values_of(kind))
    def check(command: Command) -> None:
        line = through_json(command_line(12.5, command, ControllerState(generation=7)))
        assert replayed(line) is None
        assert line["command"] == kind.__name__
        assert decode(kind, line) == command

    check()


@pytest.mark.parametrize("kind", get_args(Phase), ids=lambda kind: kind.__name__)
def test_state_is_read_back_in_every_phase(kind: type) -> None:
    hints = {name: values_of(hint) for name, hint in get_type_hints(ControllerState).items()}

    @settings(QUICK, max_examples=6)
    @given(st.builds(ControllerState, **{**hints, "phase": values_of(kind)}))
    def check(state: ControllerState) -> None:
        line = through_json(state_line(1.0, state))
        decoded = replayed(line)
        assert isinstance(decoded, ControllerState)
        assert decoded == state
        assert type(decoded.phase) is kind
        assert encode(decoded) == encode(state)

    check()


def test_journal_of_another_format_is_refused() -> None:
    line = event_line(0.0, Woke(), ControllerState())
    with pytest.raises(UnreadableJournal, match="format 1"):
        replayed({**line, "format": 1})
    with pytest.raises(UnreadableJournal, match="WorkerVanished"):
        replayed({**line, "event": "WorkerVanished"})


def test_fields_of_a_newer_writer_are_ignored() -> None:
    event = WorkerReady("w0", "node", 17)
    line = event_line(0.0, event, ControllerState())
    assert replayed({**line, "colour": "blue"}) == event


def test_union_determines_which_class_of_a_name_is_decoded() -> None:
    """The phases do not contain the command `Resume`, so it is refused there."""
    assert decode(Phase, {"is": "Ended", "outcome": "completed"}) == Ended("completed")
    with pytest.raises(UnreadableJournal, match="Resume"):
        decode(Phase, encode(Resume(1, 0, "dp=1", ("w0",), (), 0)))


def test_journal_lines_have_the_names_that_readers_rely_on() -> None:
    """The names are those of DESIGN.md, section 9."""
    hints = get_type_hints(StepCommitted)
    assert {"generation", "record", "vote"} <= hints.keys()
    line = event_line(3.0, WorkerReady("w0", "node", 17), ControllerState())
    assert {"time", "event", "generation", "format", "worker", "node", "pid"} <= line.keys()
