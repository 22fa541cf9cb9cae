"""pipelines trains: models, data, recipes, checkpoints, tracking and the command line.

A recipe is a function that returns `TrainSettings`; begin with `recipes` and `program`.
"""

from pipelines.settings import TrainSettings

__all__ = ["TrainSettings"]
