"""Exceptions in the controller of real workers: the run continues, or ends with a checkpoint."""

from __future__ import annotations

from pathlib import Path

from expected import expected
from harness import run_in_processes
from run_checks import assert_no_step_repeated
from test_bad_numbers import assert_losses_and_weights, with_settings

from actors.controller.shell import Shell
from actors.storage.checkpoint_files import find_checkpoints
from elastic.protocol.commands import Command, Form, Reshard, Resume
from elastic.protocol.events import Event, GroupFormed, StateReady, StepCommitted

SETTINGS = with_settings(steps=24, eval_every=0)


class RaisesOnce(Shell):
    """Raises once at each of several kinds of event, in the core, and of command."""

    remaining: set[type]

    def _execute(self, command: Command) -> None:
        self._raise_once(command)
        super()._execute(command)

    def _serve(self, event: Event) -> None:
        if not hasattr(self, "remaining"):
            self.remaining = {GroupFormed, StateReady, StepCommitted, Form, Reshard, Resume}
            step = self._core.step

            def step_and_raise(now: float, event: Event) -> list[Command]:
                commands = step(now, event)
                self._raise_once(event)
                return commands

            self._core.step = step_and_raise  # type: ignore[method-assign]
        super()._serve(event)

    def _raise_once(self, message: object) -> None:
        if type(message) in self.remaining:
            self.remaining.discard(type(message))
            self._core.state.committed_step += 5 * isinstance(message, StepCommitted)
            raise RuntimeError(f"broken at {type(message).__name__}")


class AlwaysRaises(Shell):
    """From step 10 on, the controller cannot write the commands that follow a committed step."""

    def _write_event(self, place: str, event: Event, commands: list[Command]) -> None:
        if isinstance(event, StepCommitted) and event.record.step >= 10:
            self._guarded.write(place, lambda: [raise_always], self._write_state)
        else:
            super()._write_event(place, event, commands)


def raise_always() -> None:
    raise RuntimeError("raised again")


def test_controller_that_raises_once_at_each_place_changes_no_loss(tmp_path: Path) -> None:
    run = run_in_processes(tmp_path, SETTINGS, 2, layout="dp=2", shell_kind=RaisesOnce)
    losses_and_norms, weights = expected(SETTINGS, 24)
    assert_losses_and_weights(run, [loss for loss, _ in losses_and_norms], weights)
    assert_no_step_repeated(run)
    places = [line["place"] for line in run.lines_of("ControllerRaised")]
    assert sorted(places) == sorted(
        ["Form", "GroupFormed", "Reshard", "StateReady", "Resume", "StepCommitted"]
    )


def test_controller_that_always_raises_ends_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    run = run_in_processes(tmp_path, SETTINGS, 2, layout="dp=2", shell_kind=AlwaysRaises)
    assert run.stopped.outcome == "failed"
    assert "failed 3 times in a row at StepCommitted" in run.stopped.reason
    assert "raised again" in run.stopped.traceback
    assert find_checkpoints(run.run).whole[-1].step == run.stopped.step >= 9
