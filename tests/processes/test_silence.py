"""A worker that does not answer: the controller waits for a busy one, but not for a stopped one."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import fields
from pathlib import Path

import pytest
from harness import run_in_processes
from interpreter_stall import STALL_S, STALLED_STEPS
from run_checks import assert_no_step_repeated
from users_policy import users_policy

from actors.runtime.fault_spec import Fault
from elastic.protocol.events import Event, StepCommitted, WorkerReady
from elastic.protocol.policy import Policy
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

SETTINGS = tiny().model_copy(
    update={"data": DataSettings(source="random", seq_len=16), "steps": 20, "eval_every": 0}
)
DEFAULT_POLICY = users_policy()
DEFAULTS = {
    field.name: getattr(DEFAULT_POLICY, field.name)
    for field in fields(Policy)
    if field.name not in ("min_workers", "max_workers")
}
FATAL_STEP = 9
MAX_DETECTION_OF_KILL_S = 0.5
"""Detection takes 0.1 s here; detection by a probe or a time limit takes over a second."""
MAX_DETECTION_OF_STOP_S = 3.5
"""`actors/controller/watch.py` takes 2.5 s; a busy machine computes and polls more slowly."""


def test_call_that_holds_the_interpreter_lock_causes_no_abort(tmp_path: Path) -> None:
    run = run_in_processes(
        tmp_path, SETTINGS, 2, layout="dp=2", program="interpreter_stall:StalledProgram", **DEFAULTS
    )
    assert run.stopped.outcome == "completed", run.story()
    slow_steps = [line["step"] for line in run.metrics if line["step_s"] > STALL_S - 0.5]
    assert slow_steps == list(STALLED_STEPS), "the stalls took place"
    for kind in ("WorkerSuspected", "Abort", "WorkerLost"):
        assert not run.lines_of(kind), run.story()
    assert_no_step_repeated(run)


@pytest.mark.slow
def test_killed_process_is_detected_without_a_probe(tmp_path: Path) -> None:
    """An idle machine takes 50 ms, which `benchmarks/recovery.py` checks."""
    pids: dict[str, int] = {}
    killed_at: list[float] = []

    def kill_w1(event: Event) -> None:
        if isinstance(event, WorkerReady):
            pids[event.worker] = event.pid
        if isinstance(event, StepCommitted) and event.record.step == FATAL_STEP and not killed_at:
            killed_at.append(time.time())
            os.kill(pids["w1"], signal.SIGKILL)

    run = run_in_processes(tmp_path, SETTINGS, 2, layout="dp=2", on_event=kill_w1)
    assert run.stopped.outcome == "completed", run.story()
    [lost] = run.lines_of("WorkerLost")
    assert lost["worker"] == "w1"
    aborted_at = run.lines_of("Abort")[0]["time"]
    assert 0.0 <= aborted_at - killed_at[0] < MAX_DETECTION_OF_KILL_S
    assert_no_step_repeated(run)


def test_stopped_process_is_suspected_at_once(tmp_path: Path) -> None:
    run = run_in_processes(
        tmp_path, SETTINGS, 3, layout="dp=3", faults=(Fault("stop", "w1", FATAL_STEP, "compute"),)
    )
    assert run.stopped.outcome == "completed", run.story()
    [suspected] = run.lines_of("WorkerSuspected")
    assert suspected["worker"] == "w1" and "its process is stopped" in suspected["cause"]
    [last_step] = [line for line in run.metrics if line["step"] == FATAL_STEP - 1]
    assert suspected["time"] - last_step["time"] < MAX_DETECTION_OF_STOP_S
    assert [line["worker"] for line in run.lines_of("WorkerLost")] == ["w1"]
    assert_no_step_repeated(run)
