"""What is wrong with a script that owns its loop, each in one line."""

from pipelines.settings.errors import UserError


class LoopMisused(UserError):
    """The loop does not do what a step needs of it."""
