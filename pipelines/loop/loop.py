"""A worker's custom training loop: runs the user's script, and restarts it if it is stuck."""

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
from pipelines.training.workload.workload import LossSums

ScriptFunction = Callable[[Run], None]
"""A function that prepares what it trains with and loops over `run.steps`."""


class Loop:
    """Runs a script up to its first step, and then passes it each step.

    A script that is stuck in a collective that will never complete is abandoned, and restarted on a
    new thread. The values of its own variables are then lost, as on a worker that has just joined.
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

    def restart_script(self) -> None:
        """Abandon the running script, and run it up to its first step again."""
        self._abandon()
        self._begin()

    def take(self, step: Step, module: nn.Module) -> list[LossSums]:
        """The losses that the loop's body computes for a step with this worker's module.

        Raises what the body raises.
        """
        if self.is_busy:
            self.restart_script()
        thread, part = self._thread, self._part
        step.on_enter = partial(part.open, module, step)
        try:
            return thread.take(step)
        finally:
            part.close()

    def _begin(self) -> None:
        self._part = part = CalledModule()
        script = self._script
        self._thread = LoopThread(lambda thread: script(Run(thread.steps, part)))
        self._abandon = finalize(self, self._thread.abandon)
        # A thread that frees tensors while the interpreter exits would abort the process.
        self._abandon.atexit = False
        with seeded(self._seed):
            self.declaration: Declaration = self._thread.declared()
