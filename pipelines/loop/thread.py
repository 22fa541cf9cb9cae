"""The user's function on a thread of its own, which is handed one step after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from actors.runtime.machine import drop_tiny_numbers
from actors.runtime.substitute_thread import stood_in_for
from pipelines.loop.declaration import Declaration, NotDeclared
from pipelines.loop.errors import LoopMisused
from pipelines.loop.step import Step
from pipelines.training.workload.workload import Sums


class LeftBehind(BaseException):
    """Unwinds the user's function where nobody waits for it any more; no `except Exception` of the
    user's catches it."""


Outcome = Declaration | list[Sums] | BaseException


class LoopThread:
    """Runs `function`, which is given this as where its steps come from.

    The training thread waits while the loop computes, and the loop between two steps, so that
    never both go on. What the function raises comes out of `declared` or `take`.
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
        """Start the function; what it has declared when it asks for its first step.

        Raises what the function raises, and `UserError` if it ends without asking.
        """
        self._thread.start()
        with stood_in_for(self._thread):
            outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, Declaration)
        return outcome

    def take(self, step: Step) -> list[Sums]:
        """Have the loop's body run for a step. Raises what the body raises."""
        if self._end is not None:
            raise self._end
        self.is_busy = True
        self._turns.put(step)
        with stood_in_for(self._thread):
            outcome = self._outcomes.get()
        self.is_busy = False
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome  # its traceback holds this frame, and the frame would hold it
        assert isinstance(outcome, list)
        return outcome

    def leave_behind(self) -> None:
        """Nobody will wait for it any more: its function ends when it asks for another step."""
        self._turns.put(None)

    def steps(self, declaration: Declaration) -> Iterator[Step]:
        """For the function: each step that it is handed, for as long as there are any."""
        self._outcomes.put(declaration)
        return self._handed()

    def _handed(self) -> Iterator[Step]:
        step = self._next()
        while True:
            yield step
            step.see_that_it_ran()
            step = self._step

    def _finish(self, outcome: Outcome) -> None:
        """Wait here for the step after; what is raised ends the function."""
        finished = self._step
        self._outcomes.put(outcome)
        finished.committed = self._next().number > finished.number

    def _next(self) -> Step:
        step = self._turns.get()
        if step is None:
            raise LeftBehind
        step.finished = self._finish
        self._step = step
        return step

    def _run(self) -> None:
        drop_tiny_numbers()
        try:
            self._function(self)
            self._end = self._left()
        except LeftBehind:
            return
        except BaseException as error:
            self._end = _reported(error)
        self._outcomes.put(self._end)

    def _left(self) -> LoopMisused:
        if self._step is None:
            return NotDeclared("the script ended without a step: loop over run.steps(num_steps)")
        return LoopMisused(
            f"step {self._step.number}: the loop was left before it; to stop there, "
            f"say run.steps({self._step.number - 1}) or --steps {self._step.number - 1}"
        )


def _reported(error: BaseException) -> BaseException:
    """An end of the process that the user's code asks for is a failure of the run's."""
    if isinstance(error, Exception):
        return error
    told = RuntimeError(f"the loop ended by {type(error).__name__}: {error}")
    return told.with_traceback(error.__traceback__)
