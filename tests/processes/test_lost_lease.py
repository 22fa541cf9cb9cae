"""Another process has taken a run over, or its storage is gone: one line, and an end in time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from test_in_process import asked

from actors.controller.run_opening import outcome_of
from actors.local.in_process import run_in_process
from actors.storage.errors import LeaseLost, RunRefused
from actors.storage.lease import STALE_S, claim
from actors.storage.storage import DiskStorage
from elastic.protocol.events import Event, StepCommitted
from pipelines.run.in_process import without_deadlines
from pipelines.run.plan import make_plan, store_recipe

MANY_STEPS = 100_000


def test_a_run_that_another_process_takes_over_ends_here_in_one_line(tmp_path: Path) -> None:
    """The worker on this thread stops amid its steps, and writes nothing more."""
    taken: list[float] = []
    began = set(threading.enumerate())

    def hear(event: Event, post: object) -> None:
        if isinstance(event, StepCommitted) and event.record.step == 5:
            [held] = (tmp_path / "run" / "lease").iterdir()
            held.unlink()  # as of a process whose storage was away for longer than STALE_S
            claim(DiskStorage(tmp_path / "run"), newer_than=1)
            taken.append(time.monotonic())

    plan = make_plan(asked(tmp_path, MANY_STEPS), num_gpus=0)
    store_recipe(plan)
    ended = run_in_process(without_deadlines(plan.run), hear)
    assert time.monotonic() - taken[0] < 2 * STALE_S
    outcome = ended.outcome
    assert (outcome.outcome, outcome.traceback) == ("failed", "")
    assert outcome.step >= 4
    assert "another process drives this run now" in outcome.reason and "\n" not in outcome.reason
    left = {thread.name for thread in set(threading.enumerate()) - began if thread.is_alive()}
    assert not left & {"controller", "training", "watch", "publisher"}, left


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (LeaseLost("epoch 3 of s3://bucket/run is over"), "another process drives this run now"),
        (RunRefused("s3://bucket/run: it cannot be opened (timeout)"), "it cannot be opened"),
        (OSError(28, "No space\nleft"), "s3://bucket/run: storage does not answer"),
    ],
)
def test_the_end_of_a_controller_that_is_no_bug_is_one_line(error: Exception, told: str) -> None:
    outcome = outcome_of(error, "s3://bucket/run", 7)
    assert (outcome.outcome, outcome.step, outcome.traceback) == ("failed", 7, "")
    assert told in outcome.reason and "\n" not in outcome.reason


def test_a_bug_is_told_with_its_traceback() -> None:
    try:
        raise ValueError("a bug")
    except ValueError as error:
        outcome = outcome_of(error, "run", 7)
    assert outcome.step == 7 and "ValueError: a bug" in outcome.reason
    assert "Traceback" in outcome.traceback
