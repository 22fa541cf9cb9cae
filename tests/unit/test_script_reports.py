"""Numbers that a script reports with a step: their totals, their way into the logs, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from elastic.protocol.events import StepCommitted
from elastic.protocol.step_records import RecordRing
from elastic.protocol.votes import SPLIT, StepRecord, Vote
from elastic.protocol.wire import metrics_row, steps_line, steps_of
from pipelines.loop.reports import RESERVED, Reported, ReportSums
from pipelines.loop.state.errors import LoopMisused
from pipelines.observe.history.goodput import Reading, TimeSplit
from pipelines.observe.history.membership import Membership
from pipelines.observe.history.progress import RunProgress
from pipelines.observe.history.run_events import RunEvent
from pipelines.observe.history.step_time import Device
from pipelines.observe.tracking.rows import (
    COUNTED,
    event_metrics,
    reading_metrics,
    step_metrics,
)

RECORD = StepRecord(5.0, 3, 1, 2, 1.0, 8, 0.1, 1.0, 0.5, False, reported={"accuracy": 0.25})


def test_numbers_are_weighted_and_pairs_are_added() -> None:
    own = Reported()
    own.add("accuracy", torch.tensor([0.5]), 4.0)
    own.add("accuracy", 1, 2.0)
    own.add("share", (torch.tensor(3), 8), 4.0)
    own.add("share", [1.0, 2.0], 4.0)
    assert own.totals() == {"accuracy": (4.0, 6.0), "share": (4.0, 10.0)}


def test_padding_samples_do_not_count() -> None:
    own = Reported()
    own.add("accuracy", math.nan, 0.0)
    own.add("share", (math.nan, 3), 0.0)
    assert own.totals() == {"accuracy": (0.0, 0.0), "share": (0.0, 0.0)}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss", 1.0, "the run logs loss; use another name"),
        ("eval_loss", 1.0, "the run logs eval_loss; use another name"),
        ("logits", torch.zeros(3), r"tensor of shape \(3,\)\): pass one number, or a pair"),
        ("label", "cat", r"step.report\(label=str\): pass one number"),
        ("triple", (1, 2, 3), r"step.report\(triple=tuple\): pass one number"),
    ],
)
def test_anything_else_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(LoopMisused, match=message):
        Reported().add(name, value, 1.0)


def test_names_of_the_run_s_metrics_are_reserved() -> None:
    row = metrics_row(replace(RECORD, reported={}, **dict.fromkeys(SPLIT, 0.1)))
    membership = Membership()
    for kind in ("resumed", "evaluated", *COUNTED):
        membership.run_events.append(RunEvent(1.0, kind, 3, 1, 2, "", value=0.5))
    metrics = [
        *step_metrics(row, "samples", Device("", 1e9, 1e12)),
        *event_metrics(membership, 0),
        *reading_metrics(Reading(1.0, 3, TimeSplit(1.0, 1.0, 1.0, 1.0), 2.0)),
    ]
    names = {metric.key for metric in metrics if metric.key.isidentifier()}
    assert names <= RESERVED and len(names) > 20


def test_sums_give_quotients_and_begin_again_with_each_step() -> None:
    sums = ReportSums()
    sums._names, sums._sums = ["accuracy", "held_out"], [0.0] * 4
    sums.add([1.0, 4.0, 0.0, 0.0])
    sums.add([2.0, 2.0, math.inf, 1.0])
    assert sums.means() == {"accuracy": 0.5, "held_out": None}
    sums.add([0.0] * 4)
    assert sums.means() == {}
    assert sums.lacks({"new": (1.0, 1.0)}) and not sums.lacks({"accuracy": (1.0, 1.0)})


def test_kept_records_keep_what_was_reported() -> None:
    ring = RecordRing()
    ring.append(replace(RECORD, step=3))
    ring.append(replace(RECORD, step=4, reported={}))
    ring.append(replace(RECORD, step=5))
    assert [record.reported for record in ring.after(2)] == [RECORD.reported, {}, RECORD.reported]
    ring.append(replace(RECORD, step=4, reported={}))
    ring.append(replace(RECORD, step=5, reported={}))
    assert [record.reported for record in ring.after(2)] == [RECORD.reported, {}, {}]


def test_old_reports_are_dropped_with_their_records() -> None:
    ring = RecordRing(capacity=8)
    for step in range(1, 100):
        ring.append(replace(RECORD, step=step))
    assert len(ring._reported) == len(ring) < 20


def test_lines_of_the_metrics_have_them_and_the_journal_does_not() -> None:
    assert metrics_row(RECORD)["reported"] == {"accuracy": 0.25}
    assert "reported" not in metrics_row(replace(RECORD, reported={}))
    vote = Vote(3, 8.0, 8, 1.0, 2)
    [(_, event)] = steps_of(steps_line([(5.0, StepCommitted(1, RECORD, vote))]))
    assert event.record == replace(RECORD, reported={})


def test_readers_show_them() -> None:
    row = metrics_row(RECORD)
    assert {m.key: m.value for m in step_metrics(row)}["accuracy"] == 0.25
    progress = RunProgress()
    progress.take(row)
    progress.take(metrics_row(replace(RECORD, step=4, reported={"accuracy": None})))
    assert progress.reported_text == "accuracy 0.25"
