"""The thread that runs a script's function and passes it one step after another."""

from __future__ import annotations

import atexit
import dis
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from inspect import currentframe
from queue import Empty, SimpleQueue
from types import CodeType, FrameType
from typing import Any
from weakref import WeakSet

from actors.runtime.machine import flush_denormals
from actors.runtime.substitute_thread import substituted_by
from pipelines.loop.declaration import Declaration, NotDeclared
from pipelines.loop.prepared.hidden_groups import hide_groups
from pipelines.loop.prepared.honoured_calls import honour_calls
from pipelines.loop.state.counted_iterators import shift_counts
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.step import Engine, Step
from pipelines.settings.user_code import place_of
from pipelines.training.workload.workload import LossSums


class Abandoned(BaseException):
    """Unwinds an abandoned function; a user's `except Exception` does not catch it."""


class Request(Enum):
    """What a script asks of all workers between two steps."""

    WEIGHTS = 1
    OPTIMIZER = 2
    EVALUATION = 3
    REPORTS = 4


class Arrived(Enum):
    """Where a script waits, or that it has ended."""

    AT_STEP = 1
    BEHIND_LOOP = 2
    AT_END = 3


@dataclass(frozen=True)
class Begin:
    """Run up to the body of a step; the step before has not committed, if there was one. None: run
    to the end of the loop, whose steps have all committed."""

    step: Step | None


@dataclass(frozen=True)
class Committed:
    """The step has committed: run up to the body of the next, if there is one."""

    next_step: Step | None


@dataclass(frozen=True)
class Compute:
    """Run the body."""

    engine: Engine


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    value: Any


@dataclass(frozen=True)
class Proceed:
    """Run what stands below the loop."""


Turn = Begin | Committed | Compute | Answer | Proceed | None
"""None: the thread is abandoned."""
Place = tuple[CodeType, int]
"""The offset of an instruction."""
Outcome = Declaration | Arrived | Request | list[LossSums] | BaseException


UNWINDING_S = 5.0
"""How long an exiting process waits for an abandoned function, which may have much to clean up."""
SUSPENDED = {"YIELD_VALUE", "RESUME"}
"""The instructions at which a generator waits."""
DROPPING = {"POP_TOP", "POP_ITER", "END_FOR", "FOR_ITER"}
"""The instructions that drop an iterator, in various versions of Python."""


class LoopThread:
    """Runs `function(thread)`, which gets its steps from this object.

    The training thread waits while the script runs, and the script waits at the body of each step
    and behind it: they never run at the same time. What waits raises what the function raises.
    """

    def __init__(self, function: Callable[[LoopThread], None]) -> None:
        self._function = function
        self._turns: SimpleQueue[Turn] = SimpleQueue()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._end: BaseException | None = None
        self._has_begun = False
        self._first: int | None = None
        """The number of the step that the script has begun with."""
        self._step: Step | None = None
        self._next: Step | None = None
        self.is_running = False
        """Whether the script runs; the training thread then waits, unless it was abandoned."""

    @property
    def has_failed(self) -> bool:
        """Whether the function has raised an exception."""
        return self._end is not None

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the script's."""
        return threading.current_thread() is self._thread

    def declared(self) -> Declaration:
        """Start the function, and return its declaration when it requests its first step.

        Raises what the function raises, and `UserError` if it ends without a step.
        """
        self._thread.start()
        outcome = self._outcome()
        assert isinstance(outcome, Declaration)
        return outcome

    def resume(self, turn: Begin | Committed | Answer | Proceed) -> None:
        """Let the script run between two bodies; see `arrival`."""
        self.refuse_ended()
        self.is_running = True
        self._turns.put(turn)

    def arrival(self, limit_s: float | None = None) -> Arrived | Request | None:
        """Wait until the script arrives, or requests something on its way; None: neither yet."""
        try:
            outcome = self._outcome(limit_s)
        except Empty:
            return None
        assert isinstance(outcome, Arrived | Request)
        return outcome

    def refuse_ended(self) -> None:
        """Raise what the function has raised, also if it was ignored before."""
        if self._end is not None:
            raise self._end

    def compute(self, engine: Engine) -> list[LossSums]:
        """Let the loop's body compute the step at which the script has arrived."""
        self.refuse_ended()
        self.is_running = True
        self._turns.put(Compute(engine))
        outcome = self._outcome()
        assert isinstance(outcome, list)
        return outcome

    def abandon(self) -> None:
        """Stop waiting for the function; it ends when it next waits."""
        self._turns.put(None)
        if not self.is_running:
            _unwinding.add(self._thread)

    def request(self, request: Request) -> Any:
        """Called by the script between two steps: what all workers then provide together."""
        self._outcomes.put(request)
        turn = self._turn()
        assert isinstance(turn, Answer)
        return turn.value

    def _outcome(self, limit_s: float | None = None) -> Outcome:
        with substituted_by(self._thread):
            outcome = self._outcomes.get(timeout=limit_s)
        self.is_running = False
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome  # breaks the reference cycle of this frame and the traceback
        return outcome

    def steps(self, declaration: Declaration) -> Iterator[Step]:
        """The function's steps, until the thread is abandoned or the script stops the run."""
        if self._step is not None:
            raise LoopMisused(
                "run.steps: a second loop: a run has one, over the steps of all epochs; step.epoch "
                "counts them"
            )
        self._outcomes.put(declaration)
        state, at = declaration.optimizer_factory.state, declaration.called.at
        turn = self._turn()
        assert isinstance(turn, Begin)
        self._next, self._has_begun = turn.step, True
        self._first = turn.step.number if turn.step else None
        state.restore()
        if turn.step and not declaration.has_epochs:
            shift_counts(currentframe(), turn.step.number - 1)
        loops: set[Place] = set()
        try:
            while (step := self._next) is not None:
                if self._step is not None:
                    step.follow(self._step)
                self._step, at.behind = step, None
                self._connect(step, declaration)
                loops.update(_places(currentframe()))
                step.seed_draws("before the body")
                declaration.variables.note()
                yield step
                step.ensure_finished()
                if not step.committed:
                    shift_counts(currentframe(), -1)
                    declaration.variables.restore()
                    state.restore()
                    at.drop_changes()
                    at.is_stopped, at.is_again = False, True
                    continue
                at.is_again = False
                state.keep(at.keep_changes())
                _report(declaration.carried.changed(), at.is_first_worker)
                if at.is_stopped:
                    break
        except GeneratorExit:
            if not _leaves_by_itself(currentframe(), loops):
                raise  # by an exception, which is reported when it arrives
            if self._step is not None and self._step.is_left_committed():
                state.keep(at.keep_changes())
        self._outcomes.put(Arrived.BEHIND_LOOP)
        while not isinstance(self._turns.get(), Proceed):
            """Only one worker runs on; to raise here would not end a script's `break`."""

    def _connect(self, step: Step, declaration: Declaration) -> None:
        step.on_enter, step.on_finish = self._enter, self._finish
        step.gather_reports = partial(self.request, Request.REPORTS)
        step.summed_samples = declaration.batch if declaration.sums_losses else None

    def _enter(self) -> Engine:
        """Called at the start of a step's body."""
        self._outcomes.put(Arrived.AT_STEP)
        turn = self._turn()
        assert isinstance(turn, Compute)
        return turn.engine

    def _finish(self, outcome: list[LossSums] | BaseException) -> bool:
        """Pass on a body's outcome, and return whether the step commits."""
        self._outcomes.put(outcome)
        turn = self._turn()
        if isinstance(turn, Committed):
            self._next = turn.next_step
            return True
        assert isinstance(turn, Begin)
        self._next = turn.step
        return False

    def _turn(self) -> Begin | Committed | Compute | Answer | Proceed:
        turn = self._turns.get()
        if turn is None:
            raise Abandoned
        return turn

    def _run(self) -> None:
        flush_denormals()
        hide_groups()
        honour_calls()
        try:
            self._function(self)
            if self._has_begun:
                self._outcomes.put(Arrived.AT_END)
                return
            self._end = NotDeclared(
                "the script ended without a step: loop over run.steps(num_steps)"
            )
        except Abandoned:
            return
        except NameError as error:
            self._end = self._explained(error)
        except BaseException as error:
            self._end = _as_failure(error)
        self._outcomes.put(self._end)

    def _explained(self, error: NameError) -> Exception:
        """A variable may be unset on a worker that has joined, and set on the others."""
        if self._first in (None, 1):
            return error
        mistake = LoopMisused(
            f"{error}: this worker has begun at step {self._first}, so variables that the steps "
            "before have set are unset: set them before the loop"
        )
        mistake.place = place_of(error)
        return mistake.with_traceback(error.__traceback__)


def _report(carried: list[str], is_first_worker: bool) -> None:
    """Print once what the script carries from step to step without the run's knowledge."""
    if carried and is_first_worker:
        print(
            f"elastic: {', '.join(carried)}: the script changes it from step to step, but it is "
            "not part of the run's state: a worker that joins and a resumed run begin with its "
            "first values. If training depends on it, pass it to run.keep before the loop, or to "
            "run.state if each microbatch has its own",
            flush=True,
        )


_unwinding: WeakSet[threading.Thread] = WeakSet()
"""Threads of abandoned functions that waited, so that they end soon."""


@atexit.register
def _await_unwinding() -> None:
    """A thread that frees tensors while the interpreter exits would abort the process."""
    for thread in [*_unwinding]:
        if thread.is_alive():
            thread.join(UNWINDING_S)


def _as_failure(error: BaseException) -> BaseException:
    """The exception as a failure of the run: the user's code may not exit the worker process."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, SystemExit):
        mistake = LoopMisused(
            f"sys.exit({error.code!r}) in the loop: end the run with `break` or run.stop(), or "
            "raise an exception"
        )
        mistake.place = place_of(error)
        return mistake.with_traceback(error.__traceback__)
    failure = RuntimeError(f"the loop ended by {type(error).__name__}: {error}")
    return failure.with_traceback(error.__traceback__)


def _leaves_by_itself(frame: FrameType | None, loops: set[Place]) -> bool:
    """Whether the code that closes a generator leaves its loop by `break` or `return`.

    Then it is at the instruction that drops the generator, and otherwise at one that has raised.
    Generators around this one, such as tqdm's, are closed with it at their `yield`. `loops` are the
    places from which the generator was advanced: the iterator of another loop may have raised.
    """
    for code, offset in _places(frame):
        names = {i.offset: i.opname for i in dis.get_instructions(code)}
        name = names.get(offset, "")
        if name not in SUSPENDED:
            return name in DROPPING and (name != "FOR_ITER" or (code, offset) in loops)
    return False


def _places(frame: FrameType | None) -> Iterator[Place]:
    """Where the callers of a frame are."""
    while (frame := frame.f_back if frame else None) is not None:
        yield frame.f_code, frame.f_lasti
