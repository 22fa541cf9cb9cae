"""If another process takes a run over, or storage is lost, the run ends soon with one line."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from test_in_process import request_for

from actors.controller.run_opening import outcome_of
from actors.local.in_process import run_in_process
from actors.storage.errors import LeaseLost, RunRefused
from actors.storage.lease import STALE_S, claim
from actors.storage.storage import DiskStorage
from elastic.protocol.events import Event, StepCommitted
from pipelines.run.in_process import without_deadlines
from pipelines.run.plan import make_plan, store_recipe

MANY_STEPS = 100_000


def test_run_that_another_process_takes_over_ends_with_one_line(tmp_path: Path) -> None:
    """The worker on this thread stops within a step, and writes nothing more."""
    taken_over_at: list[float] = []
    threads_before = set(threading.enumerate())

    def on_event(event: Event, post: object) -> None:
        if isinstance(event, StepCommitted) and event.record.step == 5:
            [lease_file] = (tmp_path / "run" / "lease").iterdir()
            lease_file.unlink()  # as if its storage did not answer for longer than STALE_S
            claim(DiskStorage(tmp_path / "run"), newer_than=1)
            taken_over_at.append(time.monotonic())

    plan = make_plan(request_for(tmp_path, MANY_STEPS), num_gpus=0)
    store_recipe(plan)
    ended = run_in_process(without_deadlines(plan.run), on_event)
    assert time.monotonic() - taken_over_at[0] < 2 * STALE_S
    outcome = ended.outcome
    assert (outcome.outcome, outcome.traceback) == ("failed", "")
    assert outcome.step >= 4
    assert "another process drives this run now" in outcome.reason and "\n" not in outcome.reason
    remaining = {
        thread.name for thread in set(threading.enumerate()) - threads_before if thread.is_alive()
    }
    assert not remaining & {"controller", "training", "watch", "publisher"}, remaining


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LeaseLost("epoch 3 of s3://bucket/run is over"), "another process drives this run now"),
        (RunRefused("s3://bucket/run: it cannot be opened (timeout)"), "it cannot be opened"),
        (OSError(28, "No space\nleft"), "s3://bucket/run: storage does not answer"),
    ],
)
def test_lost_lease_or_storage_ends_the_controller_with_one_line(
    error: Exception, message: str
) -> None:
    outcome = outcome_of(error, "s3://bucket/run", 7)
    assert (outcome.outcome, outcome.step, outcome.traceback) == ("failed", 7, "")
    assert message in outcome.reason and "\n" not in outcome.reason


def test_bug_in_the_controller_is_reported_with_its_traceback() -> None:
    try:
        raise ValueError("a bug")
    except ValueError as error:
        outcome = outcome_of(error, "run", 7)
    assert outcome.step == 7 and "ValueError: a bug" in outcome.reason
    assert "Traceback" in outcome.traceback
