"""The thread that runs a script's function and passes it one step after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from actors.runtime.machine import flush_denormals
from actors.runtime.substitute_thread import substituted_by
from pipelines.loop.declaration import Declaration, NotDeclared
from pipelines.loop.errors import LoopMisused
from pipelines.loop.step import Step
from pipelines.training.workload.workload import LossSums


class Abandoned(BaseException):
    """Unwinds an abandoned function; a user's `except Exception` does not catch it."""


Outcome = Declaration | list[LossSums] | BaseException


class LoopThread:
    """Runs `function(thread)`, which gets its steps from this object.

    The training thread waits while the loop computes, and the loop waits between two steps: they
    never run at the same time. `declared` and `take` raise what the function raises.
    """

    def __init__(self, function: Callable[[LoopThread], None]) -> None:
        self._function = function
        self._turns: SimpleQueue[Step | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._end: BaseException | None = None
        self._step: Step | None = None
        self.is_busy = False
        """Whether a step is being computed."""

    def declared(self) -> Declaration:
        """Start the function, and return its declaration when it requests its first step.

        Raises what the function raises, and `UserError` if it ends without a step.
        """
        self._thread.start()
        with substituted_by(self._thread):
            outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, Declaration)
        return outcome

    def take(self, step: Step) -> list[LossSums]:
        """Let the loop's body compute a step. Raises what the body raises."""
        if self._end is not None:
            raise self._end
        self.is_busy = True
        self._turns.put(step)
        with substituted_by(self._thread):
            outcome = self._outcomes.get()
        self.is_busy = False
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome  # breaks the reference cycle of this frame and the traceback
        assert isinstance(outcome, list)
        return outcome

    def abandon(self) -> None:
        """Stop waiting for the function; it ends when it requests another step."""
        self._turns.put(None)

    def steps(self, declaration: Declaration) -> Iterator[Step]:
        """The function's steps, until the thread is abandoned."""
        self._outcomes.put(declaration)
        return self._steps()

    def _steps(self) -> Iterator[Step]:
        step = self._next()
        while True:
            yield step
            step.ensure_finished()
            step = self._latest()

    def _finish(self, outcome: Outcome) -> None:
        """Pass on a step's outcome and wait for the next step; an exception ends the function."""
        finished = self._latest()
        self._outcomes.put(outcome)
        finished.committed = self._next().number > finished.number

    def _latest(self) -> Step:
        assert self._step is not None, "no step has begun"
        return self._step

    def _next(self) -> Step:
        step = self._turns.get()
        if step is None:
            raise Abandoned
        step.on_finish = self._finish
        self._step = step
        return step

    def _run(self) -> None:
        flush_denormals()
        try:
            self._function(self)
            self._end = self._early_end()
        except Abandoned:
            return
        except BaseException as error:
            self._end = _as_failure(error)
        self._outcomes.put(self._end)

    def _early_end(self) -> LoopMisused:
        if self._step is None:
            return NotDeclared("the script ended without a step: loop over run.steps(num_steps)")
        return LoopMisused(
            f"step {self._step.number}: the script left the loop before it; to stop there, "
            f"use run.steps({self._step.number - 1}) or --steps {self._step.number - 1}"
        )


def _as_failure(error: BaseException) -> BaseException:
    """The exception as a failure of the run: the user's code may not exit the worker process."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"the loop ended by {type(error).__name__}: {error}")
    return failure.with_traceback(error.__traceback__)
