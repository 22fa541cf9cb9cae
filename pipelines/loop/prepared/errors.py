"""Errors of a custom training loop, each reported in one line."""

from pipelines.errors import UserError


class LoopMisused(UserError):
    """The script violates the rules of a custom training loop."""
