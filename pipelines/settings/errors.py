"""What is the user's doing: told in one line, ends with exit code 2."""

from actors.storage.errors import UnfitMachine


class UserError(Exception):
    """The message says what is wrong, where, and how to mend it."""


class UserCodeFailed(UserError):
    """The user's own code has raised; `frames` are its frames as a traceback shows them, if these
    say more than the message."""

    def __init__(self, message: str, frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


class LayoutRefused(UserError):
    """A layout that no number of workers of this run can be brought into."""


class DataUnreachable(UserError, UnfitMachine):
    """The data of the run cannot be read from this machine, though perhaps from others."""
