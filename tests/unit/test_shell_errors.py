"""An exception in each event handler and each command handler in turn, in the real shell.

Once: the run completes. Always: the run ends saved, with the traceback, as far as what raises is
not itself a part of saving.
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

KINDS = sorted({kind.__name__ for kind in get_args(Event)} - {"ControllerRaised"})
COMMANDS = sorted(kind.__name__ for kind in get_args(Command))


def breaks_core(kind: str, num: int) -> Callable[[BrokenShell, BrokenCore], None]:
    def break_it(shell: BrokenShell, core: BrokenCore) -> None:
        core.kind, core.num_left = kind, num

    return break_it


def breaks_shell(kind: str, num: int) -> Callable[[BrokenShell, BrokenCore], None]:
    def break_it(shell: BrokenShell, core: BrokenCore) -> None:
        shell.kind, shell.num_left = kind, num

    return break_it


def samples_of(kind: str) -> list[Event]:
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
def test_an_exception_in_an_event_handler_ends_no_run(kind: str, tmp_path: Path) -> None:
    stopped = run_shell(tmp_path, breaks_core(kind, 1), samples_of(kind))
    if kind == "StopRequested":
        assert stopped.outcome == "interrupted" and saved_steps(tmp_path)[-1] == stopped.step
        return
    assert_saved_and_recovered(tmp_path, stopped, kind)


@pytest.mark.parametrize("kind", COMMANDS)
def test_an_exception_in_a_command_handler_ends_no_run(kind: str, tmp_path: Path) -> None:
    samples = samples_of(kind) if kind in ("Abort", "Pause") else ()
    stopped = run_shell(tmp_path, breaks_shell(kind, 1), samples, extra_commands())
    assert_saved_and_recovered(tmp_path, stopped, kind)


@pytest.mark.parametrize("kind", ["next event", "read_journal"])
def test_an_exception_in_the_shell_itself_ends_no_run(kind: str, tmp_path: Path) -> None:
    stopped = run_shell(tmp_path, breaks_shell(kind, 1))
    place = "RunOpened" if kind == "journal" else kind
    assert_saved_and_recovered(tmp_path, stopped, place)


UNSAVABLE = {
    # Nothing has been trained when it is given up.
    *("RunOpened", "CheckpointsRemoved", "StoreReady", "WorkerReady", "GroupFormed", "StateReady"),
    *("StartStore", "StartWorkers", "Form", "Reshard", "Resume", "Waited", "Resharded"),
    "next event",
    # Workers that cannot be told to unwind are ended.
    "Abort",
    # Without it no checkpoint becomes whole.
    *("PartWritten", "Checkpointed", "PublishCheckpoint", "SaveCheckpoint"),
    "journal",
}
"""Where an exception each time leaves nothing to save, or no way to."""


def assert_ended_with_traceback(folder: Path, stopped: Stopped, place: str) -> None:
    assert stopped.outcome == "failed", stopped
    assert "failed 3 times in a row" in stopped.reason and "Broken: at" in stopped.reason
    assert "Traceback" in stopped.traceback and "Broken" in stopped.traceback
    if place not in UNSAVABLE:
        assert stopped.step > 0
        assert saved_steps(folder)[-1:] == [stopped.step], stopped
    lines = (folder / "journal.jsonl").read_text().splitlines()
    assert len(lines) < 1000, "an exception again and again floods the journal"


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_handler_that_always_raises_ends_the_run_saved(kind: str, tmp_path: Path) -> None:
    stopped = run_shell(tmp_path, breaks_core(kind, 10**9), samples_of(kind))
    assert_ended_with_traceback(tmp_path, stopped, kind)


@pytest.mark.parametrize("kind", [*COMMANDS, "next event", "read_journal"])
def test_a_command_handler_that_always_raises_ends_the_run_saved(kind: str, tmp_path: Path) -> None:
    samples = samples_of(kind) if kind in ("Abort", "Pause") else ()
    stopped = run_shell(tmp_path, breaks_shell(kind, 10**9), samples, extra_commands())
    if kind == "Stopped":
        assert stopped.outcome == "completed" and saved_steps(tmp_path)[-1] == NUM_STEPS
        return
    assert_ended_with_traceback(tmp_path, stopped, kind)


class Killed(BaseException):
    """In the place of SIGKILL."""


def breaks_twice_and_dies(shell: BrokenShell, core: BrokenCore) -> None:
    """The controller's process is gone while it handles the same event for the third time."""
    core.kind, core.num_left = "Paused", 3
    step = core.step

    def dying_step(now: float, event: Event) -> list[Command]:
        if core.num_left == 1 and isinstance(event, core.kind_type):
            raise Killed
        return step(now, event)

    core.kind_type = Paused
    core.step = dying_step  # type: ignore[method-assign]


def test_the_count_survives_a_restart_of_the_controller_and_a_resume(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run_shell(tmp_path, breaks_twice_and_dies)
    assert len(read_journal(tmp_path, "ControllerRaised")) == 2
    stopped = run_shell(tmp_path, breaks_core("Paused", 10**9))
    assert "failed 3 times in a row at Paused" in stopped.reason
    assert len(read_journal(tmp_path, "ControllerRaised")) == 3
    assert stopped.outcome == "failed" and saved_steps(tmp_path)[-1] == stopped.step
    # Resumed with the same fault, it does not begin to count again; without it, it recovers.
    stopped = run_shell(tmp_path, breaks_core("Paused", 0), steps=NUM_STEPS + 10, actor="next")
    assert stopped.outcome == "completed", stopped
    assert len(read_journal(tmp_path, "ControllerRecovered")) == 1
