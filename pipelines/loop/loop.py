"""A worker's custom training loop: runs the user's script, and restarts it if it is stuck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import finalize

from torch import nn

from pipelines.loop.declaration import Declaration
from pipelines.loop.prepared.called_module import CalledModule
from pipelines.loop.prepared.optimizer_factory import LoopOptimizerFactory
from pipelines.loop.prepared.script_values import ScriptValues
from pipelines.loop.run import Run
from pipelines.loop.step import Engine, Step
from pipelines.loop.thread import (
    Answer,
    Arrived,
    Begin,
    Committed,
    LoopThread,
    Proceed,
    Request,
)
from pipelines.training.custom.custom_module import seeded
from pipelines.training.workload.workload import LossSums

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
        self.is_first_worker = False
        self.called: CalledModule
        self.declaration: Declaration
        self.request: Request | None = None
        """What the script waits for on its way."""
        self.is_behind = False
        """Whether the script has left its loop."""
        self._at: Step | None = None
        """The step at whose body the script waits, or up to which it runs."""
        self._thread: LoopThread
        self._begin()

    @property
    def is_busy(self) -> bool:
        """Whether the script runs; only a thread that was abandoned can find it so."""
        return self._thread.is_running

    def restart_script(self) -> None:
        """Abandon the running script, and run it up to its first step again."""
        self._abandon()
        self._begin()

    @property
    def optimizer_factory(self) -> LoopOptimizerFactory:
        return LoopOptimizerFactory(lambda: self.declaration.optimizer_factory)

    @property
    def values(self) -> ScriptValues:
        return self.declaration.optimizer_factory.values

    def begin(self, number: int, epoch: int, values: Callable[[], list[float]]) -> None:
        """Bring the script to the body of a step, unless it is there or on its way.

        `values` are the script's numbers at the beginning of the step.
        """
        is_elsewhere = self._at is not None and self._at.number != number
        if self.is_busy or self.is_behind or is_elsewhere:
            self.restart_script()
        if self._at is None:
            self.values.kept = values()
            self._at = Step(number, self.called, epoch)
            self._resume(Begin(self._at))

    def commit(self, number: int, epoch: int) -> None:
        """Let the script run from the end of its body to that of step `number`, 0 for none."""
        self._at = Step(number, self.called, epoch) if number else None
        self._resume(Committed(self._at))

    def await_arrival(self, limit_s: float | None = None) -> bool:
        """Wait until the script waits, at its next body, behind its loop or with a request.

        Returns whether it does.
        """
        if not self.is_busy:
            return True
        arrival = self._thread.arrival(limit_s)
        self.request = arrival if isinstance(arrival, Request) else None
        self.is_behind = self.is_behind or arrival is Arrived.BEHIND_LOOP
        return arrival is not None

    def answer(self, value: Any) -> None:
        """Answer the script's request."""
        self.request = None
        self._thread.resume(Answer(value))

    def proceed(self) -> None:
        """Let the script run what stands below its loop."""
        self._thread.resume(Proceed())

    def compute(self, engine: Engine, module: nn.Module) -> list[LossSums]:
        """The losses that the loop's body computes for a step with this worker's module.

        Raises what the body raises.
        """
        self.called.part = module
        self._at = None
        try:
            return self._thread.compute(engine)
        finally:
            self.called.part = None

    def _resume(self, turn: Begin | Committed) -> None:
        self.called.is_first_worker = self.is_first_worker
        self.called.begin_training()
        self._thread.resume(turn)

    def _begin(self) -> None:
        self._thread = thread = LoopThread(
            lambda thread: script(
                Run(thread.steps, called, lambda: thread.request(Request.EVALUATION))
            )
        )
        script = self._script
        self.called = called = CalledModule(
            lambda: thread.request(Request.WEIGHTS), lambda: thread.is_current
        )
        self.request, self._at, self.is_behind = None, None, False
        self._abandon = finalize(self, self._thread.abandon)
        # A thread that frees tensors while the interpreter exits would abort the process.
        self._abandon.atexit = False
        with seeded(self._seed):
            self.declaration = self._thread.declared()
