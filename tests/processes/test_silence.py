"""A worker that does not answer: one that is busy is waited for, one that is stopped is not."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import fields
from pathlib import Path

import pytest
from harness import run_plainly
from run_checks import assert_nothing_redone
from stalled import STALL_S, STALLED_STEPS
from users_policy import users_policy

from actors.runtime.fault_spec import Fault
from elastic.protocol.events import Event, StepCommitted, WorkerReady
from elastic.protocol.policy import Policy
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

SETTINGS = tiny().model_copy(
    update={"data": DataSettings(source="random", seq_len=16), "steps": 20, "eval_every": 0}
)
USERS = users_policy()
PRODUCTION = {
    field.name: getattr(USERS, field.name)
    for field in fields(Policy)
    if field.name not in ("min_workers", "max_workers")
}
FATAL_STEP = 9
KILLED_FOUND_S = 0.5
"""A tenth of a second suffices on this machine; a probe or a time limit takes over a second."""
FOUND_S = 3.5
"""By `actors/controller/watch.py` 2.5 s; a busy machine takes longer to compute and to look."""


def test_a_call_that_holds_the_lock_of_the_interpreter_aborts_nothing(tmp_path: Path) -> None:
    run = run_plainly(
        tmp_path, SETTINGS, 2, layout="dp=2", program="stalled:StalledProgram", **PRODUCTION
    )
    assert run.stopped.outcome == "completed", run.story()
    slow = [line["step"] for line in run.metrics if line["step_s"] > STALL_S - 0.5]
    assert slow == list(STALLED_STEPS), "the stalls have taken place"
    for kind in ("WorkerSuspected", "Abort", "WorkerLost"):
        assert not run.told(kind), run.story()
    assert_nothing_redone(run)


@pytest.mark.slow
def test_a_killed_process_is_found_without_a_probe(tmp_path: Path) -> None:
    """50 ms on a machine that does nothing else, which `benchmarks/recovery.py` checks."""
    pids: dict[str, int] = {}
    killed: list[float] = []

    def kill(event: Event) -> None:
        if isinstance(event, WorkerReady):
            pids[event.worker] = event.pid
        if isinstance(event, StepCommitted) and event.record.step == FATAL_STEP and not killed:
            killed.append(time.time())
            os.kill(pids["w1"], signal.SIGKILL)

    run = run_plainly(tmp_path, SETTINGS, 2, layout="dp=2", hear=kill)
    assert run.stopped.outcome == "completed", run.story()
    [lost] = run.told("WorkerLost")
    assert lost["worker"] == "w1"
    aborted = run.told("Abort")[0]["time"]
    assert 0.0 <= aborted - killed[0] < KILLED_FOUND_S
    assert_nothing_redone(run)


def test_a_stopped_process_is_suspected_at_once(tmp_path: Path) -> None:
    run = run_plainly(
        tmp_path, SETTINGS, 3, layout="dp=3", faults=(Fault("stop", "w1", FATAL_STEP, "compute"),)
    )
    assert run.stopped.outcome == "completed", run.story()
    [suspected] = run.told("WorkerSuspected")
    assert suspected["worker"] == "w1" and "its process is stopped" in suspected["cause"]
    [before] = [line for line in run.metrics if line["step"] == FATAL_STEP - 1]
    assert suspected["time"] - before["time"] < FOUND_S
    assert [line["worker"] for line in run.told("WorkerLost")] == ["w1"]
    assert_nothing_redone(run)
