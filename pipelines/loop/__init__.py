"""Custom training loops: the user's script iterates over steps, and repeats one after a failure."""

from pipelines.loop.run import Run
from pipelines.loop.script import current_run
from pipelines.loop.step import Step

__all__ = ["Run", "Step", "current_run"]
