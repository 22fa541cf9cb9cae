"""A worker keeps its reports and its executed orders for a restarted controller."""

from __future__ import annotations

from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.protocol.commands import Abort, Form, RequestCheckpoint, StartSnapshots
from elastic.protocol.events import GroupFormed, PartFile, PartWritten, StepCommitted, WorkerReady
from elastic.protocol.votes import StepRecord, Vote
from elastic.replay.reattachment import Intake, Outbox
from elastic.reshard.reshard_plan import ReshardPlan

READY = WorkerReady("w0", "n0", 1)


def form_order(generation: int) -> Form:
    assignment = Assignment(generation, Layout(), ("w0",))
    return Form(generation, assignment, ReshardPlan(0, 0, None, assignment, ()), "host", 1)


def commit_event(step: int) -> StepCommitted:
    record = StepRecord(0.0, step, 1, 1, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
    return StepCommitted(1, record, Vote(step, 1.0, 1, 1.0, 1))


def test_outbox_repeats_missed_reports_in_order() -> None:
    outbox = Outbox(1)
    events = [GroupFormed("w0", 1), *map(commit_event, range(1, 6))]
    for event in (READY, *events):
        outbox.add(event)
    assert outbox.events_to_repeat(2, committed_step=3) == [
        READY,
        events[0],
        commit_event(4),
        commit_event(5),
    ]
    assert outbox.incarnation == 2
    assert outbox.events_to_repeat(1, committed_step=5) == [READY, events[0]]
    assert outbox.incarnation == 2, "an older incarnation is ignored"


def test_outbox_repeats_only_parts_of_an_older_generation() -> None:
    outbox = Outbox(1)
    part = PartWritten("w0", 1, 2, PartFile("part-w0", 1, 1))
    for event in (READY, GroupFormed("w0", 1), commit_event(1), part):
        outbox.add(event)
    outbox.note(1, Abort(1, ("w0",), "a death"))
    assert len(outbox.events_to_repeat(2, 0)) == 4
    outbox.note(2, form_order(2))
    assert outbox.events_to_repeat(3, 0) == [part]
    outbox.add(GroupFormed("w0", 2))
    outbox.note(3, form_order(2))
    assert outbox.events_to_repeat(4, 0) == [part, GroupFormed("w0", 2)], (
        "the order is a repetition"
    )


def test_intake_takes_an_order_once_from_any_incarnation() -> None:
    intake = Intake()
    assert intake.takes(1, form_order(1))
    assert intake.takes(1, RequestCheckpoint(1, ("w0",), 4))
    intake.meet(2)
    assert not intake.takes(1, Abort(1, ("w0",), "sent before the restart, and late"))
    assert not intake.takes(2, form_order(1))
    assert not intake.takes(2, RequestCheckpoint(1, ("w0",), 4))
    assert intake.takes(2, RequestCheckpoint(1, ("w0",), 8))
    assert intake.takes(2, Abort(1, ("w0",), "a death"))
    assert intake.takes(2, StartSnapshots(1, ("w0",), ()))
    assert intake.takes(2, StartSnapshots(1, ("w0",), ())), "the last order counts"
    assert intake.takes(2, form_order(2))
    assert intake.generation == 2
