"""A worker's custom training loop: runs the user's script, and restarts it if it is stuck."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from elastic.geometry.sample_order import keyed_seed
from pipelines.loop.declaration import Declaration
from pipelines.loop.prepared.called_module import CalledModels
from pipelines.loop.prepared.file_models import with_file_models
from pipelines.loop.prepared.optimizer_factory import LoopOptimizerFactory
from pipelines.loop.prepared.script_moment import ScriptMoment
from pipelines.loop.run import Run
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.script_state import ScriptState
from pipelines.loop.state.script_values import ScriptValues
from pipelines.loop.step import Engine, Position, Step
from pipelines.loop.thread import (
    Answer,
    Arrived,
    Begin,
    Committed,
    LoopThread,
    Proceed,
    Request,
)
from pipelines.reading.pass_reader import seed_host
from pipelines.settings.user_code import describe, place_of
from pipelines.training.custom.modules.custom_module import seeded
from pipelines.training.workload.workload import LossSums, nothing

ScriptFunction = Callable[[Run], None]
"""A function that prepares what it trains with and loops over `run.steps`."""


class Loop:
    """Runs a script up to the body of its first step, and then each body, as the run needs it.

    A script that is stuck in a collective that will never complete is abandoned, and restarted on a
    new thread. The values of its own variables are then lost, as on a worker that has just joined.
    """

    def __init__(self, script: ScriptFunction, seed: int) -> None:
        """Every generator is seeded with `seed` before the script begins."""
        self._script = script
        self._seed = seed
        self.device = torch.device("cpu")
        """Of the worker, whose random generator is seeded, too."""
        self._is_first_worker = False
        self.called: CalledModels
        self.declaration: Declaration
        self.request: Request | None = None
        """What the script waits for on its way."""
        self.number = 0
        """The step that the script has begun, with the values in `state`."""
        self.begun_at: int | None = None
        """The first step that the script has begun."""
        self.left_after: int | None = None
        """The committed step after which the script has left its loop."""
        self.has_proceeded = False
        """Whether it has gone on below its loop."""
        self._before = 0
        self._is_repeat = False
        """Whether the script begins a step again that has not committed."""
        self._is_judged = True
        """Whether the script knows whether its latest body's step has committed."""
        self._driver = 0
        """The thread that has let the script run."""
        self.on_restart: Callable[[], None] = nothing
        """Called when the declaration is that of another execution of the script."""
        self._at: Step | None = None
        """The step at whose body the script waits, or up to which it runs."""
        self._computed: Step | None = None
        self.reporting: Step | None = None
        """The step just committed, with what the script has reported of it."""
        self.latest: Step | None = None
        """The same until the next one commits."""
        self._thread: LoopThread
        self._begin()

    @property
    def is_first_worker(self) -> bool:
        return self._is_first_worker

    @is_first_worker.setter
    def is_first_worker(self, is_first: bool) -> None:
        """Also for a script on its way to the next body: the first worker may just have died."""
        self._is_first_worker = self.called.at.is_first_worker = is_first

    @property
    def is_busy(self) -> bool:
        """Whether the script runs."""
        return self._thread.is_running

    @property
    def has_failed(self) -> bool:
        """Whether the script has raised an exception."""
        return self._thread.has_failed

    def restart_script(self, at: int | None = None, cause: BaseException | None = None) -> None:
        """Abandon the running script, and run it up to its first step again.

        If it has begun steps, say that it goes on `at` this one with the values of step 0.
        """
        if at is not None and self.begun_at is not None:
            why = f" ({place_of(cause)}{describe(cause)})" if cause else ""
            print(
                f"elastic: step {at}: the script begins again on this worker{why}, so variables "
                "that are not part of the run's state have their first values",
                flush=True,
            )
        self._abandon()
        self._begin()
        self.on_restart()

    @property
    def is_in_body(self) -> bool:
        """Whether the script computes a step, or waits behind its body."""
        return not self._is_judged

    @property
    def optimizer_factory(self) -> LoopOptimizerFactory:
        return LoopOptimizerFactory(lambda: self.declaration.optimizer_factory)

    @property
    def state(self) -> ScriptState:
        return self.declaration.optimizer_factory.state

    @property
    def values(self) -> ScriptValues:
        return self.declaration.optimizer_factory.values

    def begin_behind(self, last: int, state: Callable[[], Mapping[str, Tensor]]) -> None:
        """Bring a script that has begun no step behind its loop, whose last step has committed."""
        self.state.load(state())
        self.number, self._before = last + 1, last
        self._resume(Begin(None))

    def begin(
        self, number: int, position: Position, state: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Bring the script to the body of a step, unless it is there or on its way.

        `state` is the script's at the beginning of the step; see `ScriptState`.
        """
        is_abandoned = self.is_busy and self._driver != threading.get_ident()
        if is_abandoned or self.left_after is not None or (self._at and self.number != number):
            self.restart_script()
        if self._at is None:
            self._is_repeat, self._is_judged = not self._is_judged, True
            self.state.load(state())
            self.number, self._before = number, number - 1
            self.begun_at = self.begun_at or number
            self._at = self._step(number, position)
            self._resume(Begin(self._at))

    def commit(
        self,
        number: int,
        position: Position,
        is_last: bool,
        loss: float,
        grad_norm: float | None = None,
    ) -> None:
        """Let the script run from the end of the body of step `number` to that of the next, which
        is at `position`; `loss` and `grad_norm` are those of the step which has committed."""
        self.number, self._before = number + 1, number
        self.reporting = self.latest = self._computed
        self._computed = None
        if self.reporting is not None:
            self.reporting.loss = loss
            self.reporting.grad_norm = math.nan if grad_norm is None else grad_norm
        self._is_repeat, self._is_judged = False, True
        self.called.at.values.kept.clear()
        self._at = None if is_last else self._step(number + 1, position)
        self._resume(Committed(self._at))

    def await_arrival(self, limit_s: float | None = None) -> bool:
        """Wait until the script waits, at its next body, behind its loop or with a request.

        Returns whether it does. Raises what the script raises, unless behind a step that has not
        committed, where a variable may be unset: then it begins again.
        """
        thread = self._thread
        if not thread.is_running:
            thread.refuse_ended()
            return True
        try:
            arrival = thread.arrival(limit_s)
        except Exception as error:
            if not self._is_repeat:
                raise
            self._begin_again(error)
            return False
        if arrival is None or thread is not self._thread:
            return False
        self.request = arrival if isinstance(arrival, Request) else None
        if arrival is Arrived.AT_END:
            self.has_proceeded = True
        if arrival in (Arrived.AT_END, Arrived.BEHIND_LOOP) and self._is_repeat:
            # It left because of a step that has not committed.
            self._begin_again()
            return False
        if arrival in (Arrived.AT_END, Arrived.BEHIND_LOOP):
            self.left_after = self._before
        return True

    def _begin_again(self, cause: BaseException | None = None) -> None:
        kept, number = self.state.kept(), self.number
        position = self._at.position if self._at else Position()
        self.restart_script(number, cause)
        self.begin(number, position, lambda: kept)

    def is_at(self, committed_step: int | None) -> bool:
        """Whether the script waits at the body of the step after this one."""
        at = self._at
        return at is not None and not self.is_busy and at.number - 1 == committed_step

    def answer(self, value: Any) -> None:
        """Answer the script's request."""
        self.request = None
        self._thread.resume(Answer(value))

    def proceed(self) -> None:
        """Let the script run what stands below its loop."""
        self.has_proceeded = self.called.at.is_first_worker = True
        self._thread.resume(Proceed())

    def compute(self, engine: Engine, module: nn.Module) -> list[LossSums]:
        """The losses that the loop's body computes for a step with this worker's module.

        Raises what the body raises.
        """
        called, thread = self.called, self._thread
        if self.left_after is not None:
            raise LoopMisused(
                f"step {self.number}: the script leaves its loop before its first step"
            )
        called.use(module)
        self._computed, self.reporting = self._at, None
        self._at, self._is_judged, self._driver = None, False, threading.get_ident()
        try:
            sums = thread.compute(engine)
            called.pull()
            return sums
        finally:
            called.forget_parts()

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[None]:
        """While this worker's module is evaluated: it has the attributes of the script's model."""
        self.called.use(module)
        try:
            yield
            self.called.pull()
        finally:
            self.called.forget_parts()

    def _step(self, number: int, position: Position) -> Step:
        return Step(number, self.called.at, position, self._seed_draws)

    def _seed_draws(self, step: int, moment: str) -> None:
        seed = keyed_seed("script", self._seed, step, moment)
        seed_host(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _resume(self, turn: Begin | Committed) -> None:
        self.called.at.is_first_worker = self.is_first_worker
        self.called.at.begin_training()
        self._driver = threading.get_ident()
        self._thread.resume(turn)

    def _begin(self) -> None:
        self._thread = thread = LoopThread(
            lambda thread: script(
                Run(
                    thread.steps,
                    called,
                    lambda: thread.request(Request.EVALUATION),
                    lambda: thread.request(Request.OPTIMIZER),
                )
            )
        )
        script = with_file_models(self._script)
        self.called = called = CalledModels(
            ScriptMoment(lambda: thread.request(Request.WEIGHTS), lambda: thread.is_current)
        )
        self.request = self._at = self.left_after = self.begun_at = self.latest = None
        self.number, self.has_proceeded, self._is_judged = 0, False, True
        self._abandon = finalize(self, self._thread.abandon)
        # A thread that frees tensors while the interpreter exits would abort the process.
        self._abandon.atexit = False
        with seeded(self._seed):
            self.declaration = self._thread.declared()
