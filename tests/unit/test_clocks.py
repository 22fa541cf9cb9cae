"""A controller that was away moves every time that it remembers (see `shift_clock`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from test_core import open_run
from test_growth import SteppedRun
from test_hangs import SteppedCore, commit_steps
from test_quarantine import crash_starting_workers, join, make_run_with_a_starting_worker, select
from test_slow_survivors import lose_worker

from elastic.controller.restart import on_restarted
from elastic.duties.gang_backoff import return_deadline
from elastic.duties.quarantine import quarantine_deadline
from elastic.protocol import phases
from elastic.protocol.commands import StopWorker
from elastic.protocol.controller_events import ControllerRestarted
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import Duty
from elastic.protocol.events import GroupFormed, StateReady, WorkerReady
from elastic.protocol.notes import NodeQuarantined, NodeReleased
from elastic.protocol.phases import Resharding, Waiting
from pipelines.observe.history.membership import Membership

TIME = re.compile(
    r"(^|_)(at|since|until|before|deadline|time|began|started|progress|patience|end|when)$"
)
"""The name of a field that holds a time. The name of a duration ends in `_s`."""
STEPS = {"skipped_since"}
"""Fields of such a name that hold a step."""
EXEMPT = {
    "MarketDuty.opened_at": "the time by which a run is to be done does not wait for a controller",
    "StepDuty.boundary_at": "members pass step boundaries while the controller is away",
    "CatchUp.deadline": "a restarted controller requests the records again, with a new deadline",
    "Drain.deadline": "the end of a machine, which does not wait for the controller",
    "StepRecord.time": "when a step committed, as the metrics say",
}
"""Times that do not move, and why."""
AWAY_S = 1000.0
PHASES = [kind for kind in phases.TRANSITIONS if kind is not phases.Ended]


def holds_times(annotation: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Whether a value of this type has a field that is a time."""
    if get_origin(annotation) is not None:
        return any(holds_times(part, seen) for part in get_args(annotation))
    if not is_dataclass(annotation) or annotation in seen:
        return False
    hints = get_type_hints(annotation)
    return any(
        is_time(field.name, hints[field.name])
        or holds_times(hints[field.name], seen | {annotation})
        for field in fields(annotation)
    )


def is_time(name: str, annotation: Any) -> bool:
    """Whether a field is a time, an optional one, or a container of times."""
    kinds = set(get_args(annotation)) | {annotation}
    return bool(TIME.search(name)) and float in kinds and name not in STEPS


def filled(annotation: Any) -> Any:
    """A value of this type that has every time in it; what holds no time is arbitrary."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return filled(next(part for part in arguments if part is not type(None)))
    if origin in (list, tuple, set):
        return origin([filled(arguments[0])])
    if origin is dict:
        return {"x": filled(arguments[1])}
    if not is_dataclass(annotation):
        return 7.0 if annotation is float else None
    hints = get_type_hints(annotation)
    values = {
        field.name: filled(hints[field.name])
        for field in fields(annotation)
        if is_time(field.name, hints[field.name])
        or holds_times(hints[field.name])
        or (field.default is MISSING and field.default_factory is MISSING)
    }
    return annotation(**values)


def times_in(value: Any) -> Iterator[tuple[str, float]]:
    """Each time in a value, as `Class.field`, with its value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        for part in value:
            yield from times_in(part)
    elif is_dataclass(value):
        hints = get_type_hints(type(value))
        for field in fields(value):
            held = getattr(value, field.name)
            if is_time(field.name, hints[field.name]):
                held = list(held.values()) if isinstance(held, dict) else held
                for time in held if isinstance(held, list) else [held]:
                    yield f"{type(value).__name__}.{field.name}", time
            else:
                yield from times_in(held)


@pytest.mark.parametrize("duty", Duty.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_time_of_a_duty_moves_or_is_exempt_with_a_reason(duty: type[Duty]) -> None:
    state = filled(duty)
    assert all(time == 7.0 for _, time in times_in(state))
    state.shift_clock(AWAY_S)
    for name, time in times_in(state):
        assert time == (7.0 if name in EXEMPT else 7.0 + AWAY_S), name


@pytest.mark.parametrize("kind", PHASES, ids=lambda kind: kind.__name__)
def test_every_time_of_a_phase_moves_or_is_exempt_with_a_reason(kind: type) -> None:
    state = ControllerState(phase=filled(kind))
    on_restarted(state, AWAY_S, ControllerRestarted(2, 0.0))
    for name, time in times_in(state.phase):
        assert time == (7.0 if name in EXEMPT else 7.0 + AWAY_S), name


def test_every_duty_is_part_of_the_state_and_every_exempt_time_exists() -> None:
    values = [filled(kind) for kind in (*Duty.__subclasses__(), *PHASES)]
    names = {name for value in values for name, _ in times_in(value)}
    assert names >= EXEMPT.keys()
    assert len(names) > 15
    assert {type(duty) for duty in ControllerState().duties()} == set(Duty.__subclasses__())


def away(run: SteppedRun, seconds: float = AWAY_S) -> list[Any]:
    """The controller dies, and is restarted so much later."""
    stopped_at = run.now
    run.now += seconds
    return run.deliver(ControllerRestarted(2, stopped_at))


def test_workers_that_wait_for_others_are_not_returned_because_the_controller_was_away() -> None:
    run = SteppedRun(open_run(3, 3, gang_timeout_s=300.0, gang_jitter=0.0))
    join(run, "w0", "a")
    state = run.core.state
    assert isinstance(state.phase, Waiting)
    due = return_deadline(state)
    assert due == run.now + 300.0
    assert not select(StopWorker, away(run))
    assert return_deadline(state) == due + AWAY_S


def test_a_node_stays_quarantined_for_as_long_as_if_the_controller_had_not_been_away() -> None:
    run = make_run_with_a_starting_worker(quarantine_after=2, quarantine_s=900.0)
    assert select(NodeQuarantined, crash_starting_workers(run, "b"))
    state = run.core.state
    due = dict(state.quarantine.until)
    assert not select(NodeReleased, away(run))
    assert state.quarantine.until == {node: until + AWAY_S for node, until in due.items()}


def test_the_status_shows_the_end_of_a_quarantine_that_an_absence_has_moved() -> None:
    shown = Membership()
    quarantined = {"node": "b", "until": 900.0, "cause": "workers have crashed there 3 times"}
    shown.take({"time": 100.0, "command": "NodeQuarantined", **quarantined})
    restarted = {"event": "ControllerRestarted", "incarnation": 2, "stopped_at": 150.0}
    shown.take({"time": 150.0 + AWAY_S, **restarted})
    assert shown.quarantined == {"b": 900.0 + AWAY_S}


def test_a_run_waits_for_other_capacity_as_long_as_if_the_controller_had_not_been_away() -> None:
    """It lacked workers before it quarantined the node: its patience counts from the quarantine."""
    run = make_run_with_a_starting_worker(
        quarantine_after=2, quarantine_s=9000.0, quarantine_patience_s=300.0
    )
    assert select(NodeQuarantined, crash_starting_workers(run, "b"))
    state = run.core.state
    state.quarantine.short_since = run.now - 250.0
    due = quarantine_deadline(state)
    assert due == state.quarantine.past["b"].since + 300.0
    assert not select(NodeReleased, away(run))
    assert quarantine_deadline(state) == due + AWAY_S


def test_the_time_of_a_reshard_does_not_contain_the_absence_of_the_controller() -> None:
    run = commit_steps(SteppedCore(8), 1, 2)
    lose_worker(run, "w7")
    state = run.core.state
    assert isinstance(state.phase, phases.Forming)
    members = state.phase.attempt.plan.participants
    run.deliver(*(GroupFormed(worker, state.generation) for worker in members))
    assert isinstance(state.phase, Resharding)
    stopped_at = run.now
    run.now += AWAY_S
    run.deliver(ControllerRestarted(2, stopped_at))
    run.deliver(*(StateReady(w, state.generation, 0, 0, 0.0, 1, 1, 2) for w in members))
    assert state.forming.reshard_s < 1.0


def test_the_measured_start_of_a_worker_does_not_contain_the_absence_of_the_controller() -> None:
    run = make_run_with_a_starting_worker()
    state = run.core.state
    [starting] = state.membership.records.keys() - state.membership.warm
    away(run)
    run.now += 5.0
    run.deliver(WorkerReady(starting, "a", 1, digest="same"))
    assert state.membership.recent_start_s[-1] < AWAY_S / 2
