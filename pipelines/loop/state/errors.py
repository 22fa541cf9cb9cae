"""Errors of a custom training loop, each reported in one line."""

from __future__ import annotations

from pipelines.errors import UserError
from pipelines.settings.user_code import place_of_caller


class LoopMisused(UserError):
    """The script violates the rules of a custom training loop; the message begins with its line."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.place = place_of_caller()
        """File and line of the script, or empty if the script does not run."""

    def __str__(self) -> str:
        return f"{self.place}{self.args[0]}"
