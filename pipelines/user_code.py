"""Exceptions of the user's own code, told in one line with the place in the user's file."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.errors import UserCodeFailed, UserError

MAX_MESSAGE = 300
_PROJECT = Path(__file__).resolve().parents[1]
_OTHERS = tuple(
    f"{folder}/"
    for folder in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(str(_PROJECT / package) for package in ("elastic", "actors", "pipelines")),
    )
)
"""Folders whose files are not the user's: Python, installed packages, this project."""


@contextmanager
def code_of_user(what: str, is_all_theirs: bool = False) -> Iterator[None]:
    """Raise `UserCodeFailed` for an exception that comes out of the user's code.

    `what` names the code. An exception without a frame in a file of the user's is passed on, since
    it is a defect of ours, unless `is_all_theirs`. `SystemExit` counts as an exception.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = _frames_of_user(error)
        if not frames and not is_all_theirs:
            raise
        raise UserCodeFailed(
            f"{what}: {_place(error, frames)}{_in_one_line(error)}",
            "".join(traceback.format_list(frames)) if len(frames) > 1 else "",
        ) from error


def printable(text: str) -> str:
    """The text without the lone surrogates that no encoding knows."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_of_user(file: str) -> bool:
    """Whether code of this file is the user's: not Python's, not an installed package, not ours."""
    return not file.startswith("<frozen ") and not str(Path(file).resolve()).startswith(_OTHERS)


def _frames_of_user(error: BaseException) -> list[traceback.FrameSummary]:
    return [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_of_user(frame.filename)
    ]


def _place(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}, line {error.lineno}: "
    return f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""


def _in_one_line(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        told = error.msg
    else:
        told = "".join(traceback.format_exception_only(error)).partition(": ")[2]
    told = " ".join(printable(told).split())
    shown = told if len(told) <= MAX_MESSAGE else told[:MAX_MESSAGE] + "..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
