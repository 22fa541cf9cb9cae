"""Exceptions in the controller of real workers: the run goes on, or ends saved."""

from __future__ import annotations

from pathlib import Path

from expected import expected
from harness import run_in_processes
from run_checks import assert_no_step_repeated
from test_bad_numbers import assert_same, changed

from actors.controller.shell import Shell
from actors.storage.checkpoint_files import find_checkpoints
from elastic.protocol.commands import Command, Form, Reshard, Resume
from elastic.protocol.events import Event, GroupFormed, StateReady, StepCommitted

SETTINGS = changed(steps=24, eval_every=0)


class OftenBroken(Shell):
    """Raises once at each of some events, in the core, and at each of some commands."""

    left: set[type]

    def _execute(self, command: Command) -> None:
        self._break(command)
        super()._execute(command)

    def _serve(self, event: Event) -> None:
        if not hasattr(self, "left"):
            self.left = {GroupFormed, StateReady, StepCommitted, Form, Reshard, Resume}
            step = self._core.step

            def broken(now: float, event: Event) -> list[Command]:
                commands = step(now, event)
                self._break(event)
                return commands

            self._core.step = broken  # type: ignore[method-assign]
        super()._serve(event)

    def _break(self, what: object) -> None:
        if type(what) in self.left:
            self.left.discard(type(what))
            self._core.state.committed_step += 5 * isinstance(what, StepCommitted)
            raise RuntimeError(f"broken at {type(what).__name__}")


class AlwaysBroken(Shell):
    """From step 10 on nothing that the fleet is told of steps can be written down."""

    def _write_event(self, place: str, event: Event, commands: list[Command]) -> None:
        if isinstance(event, StepCommitted) and event.record.step >= 10:
            self._guarded.write(place, lambda: [_break_for_ever], self._write_state)
        else:
            super()._write_event(place, event, commands)


def _break_for_ever() -> None:
    raise RuntimeError("broken for ever")


def test_a_controller_that_raises_here_and_there_changes_no_loss(tmp_path: Path) -> None:
    run = run_in_processes(tmp_path, SETTINGS, 2, layout="dp=2", shell_kind=OftenBroken)
    seen, weights = expected(SETTINGS, 24)
    assert_same(run, [loss for loss, _ in seen], weights)
    assert_no_step_repeated(run)
    places = [line["place"] for line in run.lines_of("ControllerRaised")]
    assert sorted(places) == sorted(
        ["Form", "GroupFormed", "Reshard", "StateReady", "Resume", "StepCommitted"]
    )


def test_a_controller_that_always_raises_ends_the_run_saved(tmp_path: Path) -> None:
    run = run_in_processes(tmp_path, SETTINGS, 2, layout="dp=2", shell_kind=AlwaysBroken)
    assert run.stopped.outcome == "failed"
    assert "failed 3 times in a row at StepCommitted" in run.stopped.reason
    assert "broken for ever" in run.stopped.traceback
    assert find_checkpoints(run.run).whole[-1].step == run.stopped.step >= 9
