"""A worker's loop: the user's function, wherever it stands, and a new one where it was left."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from weakref import finalize

from torch import nn

from pipelines.loop.declaration import Declaration
from pipelines.loop.prepared import CalledModule
from pipelines.loop.run import Run
from pipelines.loop.step import Step
from pipelines.loop.thread import LoopThread
from pipelines.training.custom.custom_module import seeded
from pipelines.training.workload.workload import Sums

ScriptFunction = Callable[[Run], None]
"""A function that prepares what it trains with and loops over `run.steps`."""


class Loop:
    """Runs a script up to its first step, and hands it each step from then on.

    A script that is stuck where no other worker will ever answer is left there, and begun anew:
    what it has kept in variables of its own is gone then, as on a worker that has just come.
    """

    def __init__(self, script: ScriptFunction, seed: int) -> None:
        """Every generator is seeded with `seed` before the script begins."""
        self._script = script
        self._seed = seed
        self._begin()

    @property
    def is_busy(self) -> bool:
        """Whether a step is being computed."""
        return self._thread.is_busy

    def begin_anew(self) -> None:
        """Leave the script where it is, and run it up to its first step again."""
        self._leave()
        self._begin()

    def take(self, step: Step, module: nn.Module) -> list[Sums]:
        """The step's losses, as the loop's body computes them with this worker's module. Raises
        what the body raises."""
        if self.is_busy:
            self.begin_anew()
        thread, part = self._thread, self._part
        step.begun = partial(part.open, module, step)
        try:
            return thread.take(step)
        finally:
            part.close()

    def _begin(self) -> None:
        self._part = part = CalledModule()
        script = self._script
        self._thread = LoopThread(lambda thread: script(Run(thread.steps, part)))
        self._leave = finalize(self, self._thread.leave_behind)
        # A thread that frees tensors while the interpreter ends takes the whole process with it.
        self._leave.atexit = False
        with seeded(self._seed):
            self.declaration: Declaration = self._thread.declared()
