"""Exceptions of the user's code, reported in one line with the file and line of that code."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.errors import UserCodeFailed, UserError

MAX_MESSAGE = 300
_PROJECT = Path(__file__).resolve().parents[2]
_PACKAGES = tuple(f"{_PROJECT / package}/" for package in ("elastic", "actors", "pipelines"))
_INSTALLED = tuple(
    f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""Folders of Python and of installed packages."""


@contextmanager
def user_code_errors(what: str, is_all_theirs: bool = False) -> Iterator[None]:
    """Raise `UserCodeFailed` for an exception of the user's code.

    `what` names the code. An exception whose frames are all in this project is a defect of this
    project and is passed on, unless `is_all_theirs`. `SystemExit` counts as the user's exception.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = _frames_of_user(error)
        if not (frames or is_all_theirs or isinstance(error, SystemExit)):
            raise
        raise UserCodeFailed(
            f"{what}: {_place(error, frames)}{describe(error)}",
            "".join(traceback.format_list(frames)) if len(frames) > 1 else "",
        ) from error


def is_users(file: str) -> bool:
    """Whether a file is the user's: neither of this project nor of an installed package."""
    return not _is_in(file, _PACKAGES + _INSTALLED)


def printable(text: str) -> str:
    """The text with lone surrogates, which cannot be encoded, replaced by escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _frames_of_user(error: BaseException) -> list[traceback.FrameSummary]:
    """The traceback frames in the user's files, without those of this project.

    If there are none, the frames in installed packages: a recipe may be a package's function.
    """
    foreign = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ") and not _is_in(frame.filename, _PACKAGES)
    ]
    return [frame for frame in foreign if not _is_in(frame.filename, _INSTALLED)] or foreign


def _is_in(file: str, folders: tuple[str, ...]) -> bool:
    return str(Path(file).resolve()).startswith(folders)


def _place(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}, line {error.lineno}: "
    return f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""


def describe(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        message = error.msg
    else:
        message = "".join(traceback.format_exception_only(error)).partition(": ")[2]
    message = " ".join(printable(message).split())
    shown = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
