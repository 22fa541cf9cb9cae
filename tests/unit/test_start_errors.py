"""An exception in each step of opening a run, or of taking it over from a dead controller.

If the step raises once, the run completes. If it always raises, the run ends with the traceback,
and its state is saved if there is any. The controller waits for storage that does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
from broken_shell import (
    EVENTFUL_STEP,
    NUM_STEPS,
    BrokenCore,
    BrokenShell,
    read_journal,
    run_shell,
    saved_steps,
)

from actors.controller.start_guard import STORAGE_PATIENCE_S, StartGuard
from actors.storage.errors import LeaseLost, RunRefused
from elastic.protocol.commands import Command, Stopped
from elastic.protocol.controller_events import ControllerRaised, ControllerRecovered
from elastic.protocol.events import Event, StepCommitted

Break = Callable[[BrokenShell, BrokenCore], None]
STEPS = {
    "fresh": ("missing lines", "missing metrics", "clearing away", "opening"),
    "takeover": ("missing lines", "missing metrics", "newest generation", "attaching"),
}
CASES = [(kind, step) for kind, steps in STEPS.items() for step in steps]


class Killed(BaseException):
    """Ends the controller, as SIGKILL would."""


def die_while_training(shell: BrokenShell, core: BrokenCore) -> None:
    """The controller dies while workers train."""
    original_step = core.step

    def step(now: float, event: Event) -> list[Command]:
        if isinstance(event, StepCommitted) and event.record.step > EVENTFUL_STEP:
            raise Killed
        return original_step(now, event)

    core.step = step  # type: ignore[method-assign]


def break_step(step: str, num: int, error: type[Exception] | None = None) -> Break:
    def install(shell: BrokenShell, core: BrokenCore) -> None:
        shell.kind, shell.num_left = step, num
        shell.error = error or shell.error

    return install


def open_run(folder: Path, kind: str, install: Break) -> Stopped:
    if kind == "takeover":
        with pytest.raises(Killed):
            run_shell(folder, die_while_training, may_survive=True)
        [lease_file] = (folder / "lease").iterdir()  # a killed process releases nothing
        lease_file.write_text(
            lease_file.read_text().replace('"released": true', '"released": false')
        )
    return run_shell(folder, install, may_survive=True)


@pytest.mark.parametrize(("kind", "step"), CASES)
def test_single_exception_at_the_start_ends_no_run(tmp_path: Path, kind: str, step: str) -> None:
    stopped = open_run(tmp_path, kind, break_step(step, 1))
    assert (stopped.outcome, stopped.step) == ("completed", NUM_STEPS), stopped
    assert saved_steps(tmp_path)[-1] == NUM_STEPS
    [raised] = read_journal(tmp_path, "ControllerRaised")
    assert f"Broken: at {step}" in raised["message"] and "Traceback" in raised["traceback"]
    assert len(read_journal(tmp_path, "ControllerRecovered")) == 1
    assert len(read_journal(tmp_path, "RunOpened")) == 1
    assert len(read_journal(tmp_path, "ControllerRestarted")) == (kind == "takeover")


@pytest.mark.parametrize(("kind", "step"), CASES)
def test_start_waits_for_storage_that_does_not_answer(tmp_path: Path, kind: str, step: str) -> None:
    stopped = open_run(tmp_path, kind, break_step(step, 1, OSError))
    assert (stopped.outcome, stopped.step) == ("completed", NUM_STEPS), stopped
    assert saved_steps(tmp_path)[-1] == NUM_STEPS
    assert not read_journal(tmp_path, "ControllerRaised")
    assert len(read_journal(tmp_path, "RunOpened")) == 1, "the run keeps its training workers"


@pytest.mark.parametrize(("kind", "step"), CASES)
def test_start_that_always_raises_ends_the_run_with_the_traceback(
    tmp_path: Path, kind: str, step: str
) -> None:
    stopped = open_run(tmp_path, kind, break_step(step, 10**9))
    assert stopped.outcome == "failed", stopped
    assert "failed 3 times in a row" in stopped.reason and f"at {step}" in stopped.reason
    assert "Traceback" in stopped.traceback and "Broken" in stopped.traceback
    if kind == "takeover" and step != "attaching":
        assert stopped.step > 0
        assert saved_steps(tmp_path)[-1:] == [stopped.step], "the workers hold the state"


def test_permanently_unreachable_storage_refuses_the_run_in_one_line() -> None:
    guard, tries = StartGuard("s3://bucket/run", 0.2, set()), []

    def read() -> None:
        tries.append(guard.trouble)
        raise ConnectionError("no route to host")

    with pytest.raises(RunRefused, match="run: the run cannot be opened"):
        guard.attempt("metrics", read)
    assert len(tries) > 1 and "no route to host" in tries[-1]
    assert not guard.events


def test_controller_of_a_detached_run_waits_for_storage_without_limit() -> None:
    waited_s: list[float] = []
    guard = StartGuard("run", inf, set(), waited_s.append, lambda: sum(waited_s))

    def read() -> None:
        if sum(waited_s) < 20 * STORAGE_PATIENCE_S:
            raise ConnectionError("no route to host")

    assert guard.attempt("metrics", read)
    assert not guard.events and not guard.trouble


def test_lease_lost_at_the_start_is_not_retried() -> None:
    guard, tries = StartGuard("run", 60.0, set()), []

    def read() -> None:
        tries.append(1)
        raise LeaseLost("epoch 1 is over")

    with pytest.raises(LeaseLost):
        guard.attempt("metrics", read)
    assert len(tries) == 1


def test_success_resets_the_count_of_exceptions() -> None:
    guard = StartGuard("run", 60.0, {"metrics"})
    assert guard.attempt("journal", lambda: None) and guard.attempt("metrics", lambda: None)
    assert guard.events == [ControllerRecovered("metrics")]
    assert not guard.attempt("journal", lambda: 1 / 0)
    assert [type(event) for event in guard.events[1:]] == [ControllerRaised] * 3
