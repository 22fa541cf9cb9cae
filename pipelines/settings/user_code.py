"""Exceptions of the user's code, reported in one line with the file and line of that code."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from inspect import currentframe
from pathlib import Path

from pipelines.errors import UserCodeFailed, UserError

MAX_MESSAGE = 300
TRACEBACK = "Traceback (most recent call last):"
ADVICE = {
    r"Default process group has not been init|variable RANK expected|process group twice": (
        "a run forms its process groups itself: drop torch.distributed, DistributedDataParallel "
        "and DistributedSampler from the script"
    ),
    r"KeyError: '(?:RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR)'": (
        "the workers of a run change, so none has a rank: use step.is_first_worker"
    ),
    r"not compiled with CUDA|Cannot get CUDA generator|No CUDA GPUs|no NVIDIA driver": (
        "the script runs on this machine, too, to plan the run: name no device, since the run "
        "moves the model and its batches to that of each worker"
    ),
    r"ModuleNotFoundError": "install it, or put it beside the file",
}
"""How to fix what scripts often do, by the exception."""
_PROJECT = Path(__file__).resolve().parents[2]
_PACKAGES = tuple(f"{_PROJECT / package}/" for package in ("elastic", "actors", "pipelines"))
_STARTERS = tuple(f"{_PROJECT / 'pipelines' / folder}/" for folder in ("api", "run"))
_INSTALLED = tuple(
    f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""Folders of Python and of installed packages."""


@contextmanager
def prints_dropped() -> Iterator[None]:
    """Drop what a user prints in code that runs again, or whose output belongs to workers."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


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


@cache
def is_users(file: str) -> bool:
    """Whether a file is the user's: neither of this project nor of an installed package."""
    return not _is_in(file, _PACKAGES + _INSTALLED)


def place_of_caller() -> str:
    """The file and line of the user's code that has called this project, or empty if that is only
    the program that has started the run."""
    frame = currentframe()
    while (frame := frame.f_back if frame else None) is not None:
        file = frame.f_code.co_filename
        if _is_in(file, _STARTERS):
            return ""
        if not file.startswith("<frozen ") and is_users(file):
            return f"{file}, line {frame.f_lineno}: "
    return ""


def place_of(error: BaseException) -> str:
    """The file and line of the user's code where an exception was raised, or empty."""
    return _place(error, _frames_of_user(error))


def short_traceback(text: str) -> str:
    """A printed traceback from the first frame of the user's code on, of each exception in it."""
    return "".join(map(_from_users_frame, re.split(rf"(?m)(?=^{re.escape(TRACEBACK)})", text)))


def _from_users_frame(part: str) -> str:
    head, *frames = re.split(r'(?m)(?=^  File ")', part)
    files = [frame.split('"')[1] for frame in frames]
    is_theirs = [not file.startswith("<frozen ") and is_users(file) for file in files]
    first = is_theirs.index(True) if any(is_theirs) else 0
    return "".join([head, *frames[first:]])


def described(function: object) -> str:
    """A function's name, with the file and the line of its definition if they are known."""
    function = getattr(function, "func", function)  # of a `partial`
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}: {name}" if code else name


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
    line = f"{type(error).__name__}: {shown}" if shown else type(error).__name__
    advice = next((fix for text, fix in ADVICE.items() if re.search(text, line)), None)
    return f"{line.partition('. ')[0].rstrip('.!')}: {advice}" if advice else line
