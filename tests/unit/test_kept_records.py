"""The records of steps that a worker reports when it unwinds."""

from __future__ import annotations

import pytest

from actors.worker.step_protocol import KeptRecords, quiesced
from elastic.protocol.step_records import NUM_REPORTED_RECORDS
from elastic.protocol.votes import StepRecord

NEWEST_STEP = 200


def make_record(step: int) -> StepRecord:
    return StepRecord(float(step), step, 1, 2, 1.0, 8, 0.1, 1.0, 0.5, skipped=False)


@pytest.fixture
def records() -> KeptRecords:
    records = KeptRecords()
    for step in range(1, NEWEST_STEP + 1):
        records.append(make_record(step))
    return records


@pytest.mark.parametrize(
    ("num_missing", "num_reported"),
    [
        (0, 0),
        (1, 1),
        (NUM_REPORTED_RECORDS, NUM_REPORTED_RECORDS),
        (NUM_REPORTED_RECORDS + 1, 0),
        (NEWEST_STEP, 0),
    ],
)
def test_report_has_all_missing_records_or_none_if_they_are_too_many(
    records: KeptRecords, num_missing: int, num_reported: int
) -> None:
    """The controller requests more with `SendRecords`: some of them alone would leave a gap."""
    known_step = NEWEST_STEP - num_missing
    reported = records.for_report(known_step)
    steps = range(known_step + 1, known_step + 1 + num_reported)
    assert reported == tuple(make_record(step) for step in steps)
    report = quiesced("w0", 1, None, NEWEST_STEP, reported, saving_step=0)
    assert (report.committed_step, report.records) == (NEWEST_STEP, reported)


def test_report_to_a_controller_that_is_ahead_has_no_records(records: KeptRecords) -> None:
    assert records.for_report(NEWEST_STEP + 5) == ()


def test_worker_that_does_not_hold_the_state_reports_no_older_records(
    records: KeptRecords,
) -> None:
    records.go_on_from(NEWEST_STEP, is_holder=False)
    assert records.for_report(0) == ()
