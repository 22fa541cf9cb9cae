"""The thread that calls a run's callbacks, so that neither the training nor a display waits."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from elastic.protocol.commands import Stopped
from pipelines.callbacks.callback import Callback
from pipelines.callbacks.records import CommittedStep, EndedRun
from pipelines.callbacks.run_calls import Call, RunCalls
from pipelines.errors import UserError
from pipelines.observe.history.run_folder import RunFolder
from pipelines.settings.user_code import describe

LOOK_EVERY_S = 0.5
STORAGE_PATIENCE_S = 30.0
"""How long the last lines of a run may be unreadable."""
CALL_PATIENCE_S = 300.0
"""How long one call may take once the run has ended."""
NOTE_AFTER_S = 10.0


@dataclass
class NamedCallback:
    """A callback, its name in messages and of its file, and whether it is still called."""

    callback: Callback
    name: str
    has_failed: bool = False


@dataclass
class CallbackThread:
    """Follows the files of a run and calls its callbacks; does nothing without callbacks.

    Create it before the run is started, `start` it once the run is, and `finish` it with the
    outcome. `failures` has a line for each callback that has raised.
    """

    folder: RunFolder
    callbacks: Sequence[NamedCallback]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    outcome: Stopped | None = None
    call_patience_s: float = CALL_PATIENCE_S

    def __post_init__(self) -> None:
        """Raises `UserError` if the run's files cannot be read."""
        self._metrics: Mapping[str, Any] = {}
        self._present_call = ""
        self._active_at = 0.0
        """When the last call ended, or the files were last read."""
        self._has_ended = threading.Event()
        self._is_abandoned = False
        self._thread: threading.Thread | None = None
        if not self.callbacks:
            return
        try:
            self._calls = RunCalls(self.folder, self.recipe)
        except OSError as error:
            where = self.folder.storage
            raise UserError(f"--storage {where}: cannot be read ({error})") from None

    def start(self) -> None:
        """Begin to follow the run."""
        if self.callbacks:
            self._thread = threading.Thread(target=self._serve, name="callbacks", daemon=True)
            self._thread.start()

    def finish(self, outcome: Stopped) -> None:
        """Wait for all calls, however many there are; a single one may take `call_patience_s`."""
        if self._thread is None:
            return
        self.outcome = outcome
        self._has_ended.set()
        began, is_noted = time.monotonic(), False
        while self._thread.is_alive():
            self._thread.join(0.2)
            now, call = time.monotonic(), self._present_call
            if now - max(began, self._active_at) > self.call_patience_s:
                self.abandon()
                doing = f"callback {call} does not return" if call else "the run's files hang"
                self._fail(f"{doing}: the remaining calls are dropped")
                return
            if not is_noted and call and now - began > NOTE_AFTER_S:
                is_noted = True
                print_line(f"waiting for callbacks ({call}); Ctrl-C twice ends without them")

    def abandon(self) -> None:
        """Call nothing after the present call."""
        self._is_abandoned = True
        self._has_ended.set()

    def _serve(self) -> None:
        try:
            self._follow()
            if self._calls.is_opened:
                self._call_all(Call("on_end", self._ended_run()))
        except Exception as error:  # the run goes on, and its end reports it
            traceback.print_exc()
            self._fail(f"no callback is called any more: {describe(error)}")

    def _follow(self) -> None:
        """Make all calls before the last one, until the run has ended."""
        ended_at: float | None = None
        while not self._is_abandoned:
            if self._has_ended.wait(LOOK_EVERY_S) and ended_at is None:
                ended_at = time.monotonic()
            try:
                for call in self._calls.read(is_last=ended_at is not None):
                    self._call_all(call)
                self._active_at = time.monotonic()
                if ended_at is not None:
                    return
            except OSError as error:
                if ended_at is not None:
                    if time.monotonic() - ended_at > STORAGE_PATIENCE_S:
                        self._fail(f"callbacks lack the last steps: {self.folder.url}: {error}")
                        return
                    time.sleep(LOOK_EVERY_S)

    def _ended_run(self) -> EndedRun:
        outcome = self.outcome or Stopped("failed", self._calls.step, "it was abandoned")
        return EndedRun(
            outcome.outcome,
            max(outcome.step, self._calls.step),
            outcome.reason,
            outcome.traceback,
            self._metrics,
            tuple(self.failures),
        )

    def _call_all(self, call: Call) -> None:
        if isinstance(call.record, CommittedStep):
            self._metrics = call.record.metrics
        for named in self.callbacks:
            if named.has_failed or self._is_abandoned:
                continue
            self._present_call = f"{named.name}.{call.method}"
            try:
                getattr(named.callback, call.method)(call.record)
            except BaseException as error:  # whatever the user's code raises, the run continues
                named.has_failed = True
                self._report(named, call, error)
            self._present_call, self._active_at = "", time.monotonic()

    def _report(self, named: NamedCallback, call: Call, error: BaseException) -> None:
        """Print one line, and keep the traceback in the run's folder."""
        file = f"logs/callback-{named.name}.err"
        text = "".join(traceback.format_exception(error))
        at = f" at step {self._calls.step}"
        where = self.folder.files.at(file).url
        try:
            self.folder.files.write(file, text.encode("utf-8", "backslashreplace"))
        except OSError:
            print_line(f"callback {named.name}.{call.method}:\n{text}")
            where = "above"
        self._fail(
            f"callback {named.name}.{call.method} raised {describe(error)}{at} and is not called "
            f"any more; traceback: {where}"
        )

    def _fail(self, line: str) -> None:
        self.failures.append(line)
        print_line(line)


def print_line(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal is gone
        print(f"elastic: {text}", file=sys.stderr)


@contextmanager
def called_back(
    folder: RunFolder, callbacks: Sequence[NamedCallback], recipe: Mapping[str, Any]
) -> Iterator[CallbackThread]:
    """Call the callbacks of a run that the block starts, ends and whose `outcome` it sets.

    At the end of the block all calls have been made, also if it raises an exception. An
    interruption by the user does not wait for them. Raises `UserError`.
    """
    calls = CallbackThread(folder, callbacks, recipe)
    try:
        try:
            yield calls
        except Exception as error:
            calls.finish(Stopped("failed", 0, f"{type(error).__name__}: {error}"))
            raise
        if calls.outcome is not None:
            calls.finish(calls.outcome)
    finally:  # the user may interrupt the run, or the wait for its last calls
        calls.abandon()
