"""Exceptions in each event handler and each command handler of the real shell.

If the handler raises once, the run completes. If it always raises, the run ends with the
traceback, and its state is saved unless that handler is needed for saving.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from broken_shell import (
    NUM_STEPS,
    SAMPLES,
    Broken,
    BrokenCore,
    BrokenShell,
    extra_commands,
    read_journal,
    run_shell,
    saved_steps,
)

from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.commands import Command, Stopped
from elastic.protocol.events import Event, LayoutRequested, Paused, WorkerRaised
from elastic.protocol.votes import StepRecord

pytestmark = pytest.mark.slow

KINDS = sorted({kind.__name__ for kind in get_args(Event)} - {"ControllerRaised"})
COMMANDS = sorted(kind.__name__ for kind in get_args(Command))


def break_core(kind: str, num: int) -> Callable[[BrokenShell, BrokenCore], None]:
    def install(shell: BrokenShell, core: BrokenCore) -> None:
        core.kind, core.num_left = kind, num

    return install


def break_shell(kind: str, num: int) -> Callable[[BrokenShell, BrokenCore], None]:
    def install(shell: BrokenShell, core: BrokenCore) -> None:
        shell.kind, shell.num_left = kind, num

    return install


def events_that_cause(kind: str) -> list[Event]:
    if kind == "Pause":
        return [LayoutRequested("request", TargetLayout.parse("dp=1", 2))]
    if kind == "Abort":
        return [WorkerRaised("w0", 1, "peer", "a broken connection")]
    return [sample for sample in SAMPLES if type(sample).__name__ == kind]


def assert_saved_and_recovered(folder: Path, stopped: Stopped, place: str) -> None:
    assert (stopped.outcome, stopped.step) == ("completed", NUM_STEPS), stopped
    assert saved_steps(folder)[-1] == NUM_STEPS
    raised = read_journal(folder, "ControllerRaised")
    assert [line["place"] for line in raised] == [place]
    assert "Broken: at" in raised[0]["message"] and "Traceback" in raised[0]["traceback"]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
    assert sorted(set(steps)) == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_single_exception_in_an_event_handler_ends_no_run(kind: str, tmp_path: Path) -> None:
    stopped = run_shell(tmp_path, break_core(kind, 1), events_that_cause(kind))
    if kind == "StopRequested":
        assert stopped.outcome == "interrupted" and saved_steps(tmp_path)[-1] == stopped.step
        return
    assert_saved_and_recovered(tmp_path, stopped, kind)


@pytest.mark.parametrize("kind", COMMANDS)
def test_single_exception_in_a_command_handler_ends_no_run(kind: str, tmp_path: Path) -> None:
    samples = events_that_cause(kind) if kind in ("Abort", "Pause") else ()
    stopped = run_shell(tmp_path, break_shell(kind, 1), samples, extra_commands())
    assert_saved_and_recovered(tmp_path, stopped, kind)


@pytest.mark.parametrize("kind", ["next event", "journal"])
def test_single_exception_in_the_shell_ends_no_run(kind: str, tmp_path: Path) -> None:
    stopped = run_shell(tmp_path, break_shell(kind, 1))
    place = "RunOpened" if kind == "journal" else kind
    assert_saved_and_recovered(tmp_path, stopped, place)


def test_exceptions_of_a_command_that_are_not_in_a_row_end_no_run(tmp_path: Path) -> None:
    """Each is retried with success, which resets the count."""
    steps = {10, 20, 30, 40}

    def break_it(shell: BrokenShell, core: BrokenCore) -> None:
        record = shell._record

        def raise_sometimes(line: StepRecord) -> None:
            if line.step in steps:
                steps.discard(line.step)
                raise Broken(f"at step {line.step}")
            record(line)

        shell._record = raise_sometimes  # type: ignore[method-assign]

    stopped = run_shell(tmp_path, break_it)
    assert (stopped.outcome, stopped.step) == ("completed", NUM_STEPS), stopped
    assert not steps
    for name in ("ControllerRaised", "ControllerRecovered"):
        assert [line["place"] for line in read_journal(tmp_path, name)] == ["RecordStep"] * 4


UNSAVABLE = {
    # No step has committed when the run ends.
    *("RunOpened", "CheckpointsRemoved", "StoreReady", "WorkerReady", "GroupFormed", "StateReady"),
    *("StartStore", "StartWorkers", "Form", "Reshard", "Resume", "Waited", "Resharded"),
    "next event",
    # Workers that get no order to unwind are ended.
    "Abort",
    # Without it no checkpoint becomes complete.
    *("PartWritten", "Checkpointed", "PublishCheckpoint", "SaveCheckpoint"),
    "journal",
}
"""Places where a permanent exception leaves nothing to save, or no way to save it."""


def assert_ended_with_traceback(folder: Path, stopped: Stopped, place: str) -> None:
    assert stopped.outcome == "failed", stopped
    assert "failed 3 times in a row" in stopped.reason and "Broken: at" in stopped.reason
    assert "Traceback" in stopped.traceback and "Broken" in stopped.traceback
    if place not in UNSAVABLE:
        assert stopped.step > 0
        assert saved_steps(folder)[-1:] == [stopped.step], stopped
    lines = (folder / "journal.jsonl").read_text().splitlines()
    assert len(lines) < 1000, "a permanent exception must not flood the journal"


@pytest.mark.parametrize("kind", KINDS)
def test_event_handler_that_always_raises_ends_the_run_saved(kind: str, tmp_path: Path) -> None:
    stopped = run_shell(tmp_path, break_core(kind, 10**9), events_that_cause(kind))
    assert_ended_with_traceback(tmp_path, stopped, kind)


@pytest.mark.parametrize("kind", [*COMMANDS, "next event", "journal"])
def test_command_handler_that_always_raises_ends_the_run_saved(kind: str, tmp_path: Path) -> None:
    samples = events_that_cause(kind) if kind in ("Abort", "Pause") else ()
    stopped = run_shell(tmp_path, break_shell(kind, 10**9), samples, extra_commands())
    if kind == "Stopped":
        assert stopped.outcome == "completed" and saved_steps(tmp_path)[-1] == NUM_STEPS
        return
    assert_ended_with_traceback(tmp_path, stopped, kind)


class Killed(BaseException):
    """Ends the controller, as SIGKILL would."""


def break_twice_and_die(shell: BrokenShell, core: BrokenCore) -> None:
    """The controller dies while it handles the same event for the third time."""
    core.kind, core.num_left = "Paused", 3
    step = core.step

    def dying_step(now: float, event: Event) -> list[Command]:
        if core.num_left == 1 and isinstance(event, core.kind_type):
            raise Killed
        return step(now, event)

    core.kind_type = Paused
    core.step = dying_step  # type: ignore[method-assign]


def test_count_of_exceptions_survives_a_restart_and_a_resume(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run_shell(tmp_path, break_twice_and_die)
    assert len(read_journal(tmp_path, "ControllerRaised")) == 2
    stopped = run_shell(tmp_path, break_core("Paused", 10**9))
    assert "failed 3 times in a row at Paused" in stopped.reason
    assert len(read_journal(tmp_path, "ControllerRaised")) == 3
    assert stopped.outcome == "failed" and saved_steps(tmp_path)[-1] == stopped.step
    # A resumed run with the same fault continues the count; without the fault it recovers.
    stopped = run_shell(tmp_path, break_core("Paused", 0), steps=NUM_STEPS + 10, actor="next")
    assert stopped.outcome == "completed", stopped
    assert len(read_journal(tmp_path, "ControllerRecovered")) == 1
