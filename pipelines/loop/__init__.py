"""The loop stays the user's: a script that calls for its steps, and is handed the same one again
after a failure."""

from pipelines.loop.run import Run
from pipelines.loop.step import Step

__all__ = ["Run", "Step"]
