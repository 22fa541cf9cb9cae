"""User errors: each is reported in one line and ends the command with exit code 2."""

from actors.storage.errors import ProgramRefused, UnsuitableMachine


class UserError(ProgramRefused):
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


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; empty if it has none."""
    return (str(error).splitlines() or [""])[0]


def refuse_undecodable(option: str, text: str) -> None:
    """Raises `UserError` for invalid UTF-8, which Python decodes to lone surrogates, and for
    NUL."""
    shown = text.encode("utf-8", "backslashreplace").decode()
    if shown != text:
        raise UserError(f"{option} {shown}: not valid UTF-8; rename or retype it")
    if "\0" in text:
        raise UserError(f"{option} {text!r}: contains a NUL character; remove it")
