"""User errors: each is reported in one line and ends the command with exit code 2."""

from actors.storage.errors import UnsuitableMachine


class UserError(Exception):
    """A mistake in what the user gave; the message says what is wrong, where, and how to fix it."""


class UserCodeFailed(UserError):
    """The user's code raised an exception.

    `frames` are the formatted traceback frames of that code, or empty if the message names the
    only one.
    """

    def __init__(self, message: str, frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


class LayoutRefused(UserError):
    """A requested layout that is infeasible with any number of workers."""


class DataUnreachable(UserError, UnsuitableMachine):
    """This machine cannot read the run's data; other machines may be able to."""
