"""Stack traces of a worker's threads, written to the run folder when a worker hangs."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from traceback import walk_stack
from types import FrameType

from actors.runtime.substitute_thread import working_thread
from actors.storage.storage import Storage

FOLDER = "traces"
WAITS = ("actors.distributed.backends.waiting", "actors.distributed.stall")
"""Modules whose frames only wait for a collective: their callers say for which."""
OURS = ("actors", "elastic", "pipelines")


def stacks() -> str:
    """The stack of each thread of this process, the newest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sys._current_frames().items():
        texts.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(texts)


def position(thread: threading.Thread) -> str:
    """Where the code of this thread, or of its substitute at work, is now: the innermost call
    outside of torch and the standard library, the user's if there is one; empty if there is none.
    """
    top = sys._current_frames().get(working_thread(thread.ident or 0))
    shown = [frame for frame, _ in walk_stack(top) if _is_shown(frame)] if top else []
    users = [frame for frame in shown if _package(frame) not in OURS]
    frame = next(iter(users or shown), None)
    if frame is None:
        return ""
    file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"


def _is_shown(frame: FrameType) -> bool:
    package = _package(frame)
    is_wait = frame.f_globals.get("__name__") in WAITS
    return package != "torch" and package not in sys.stdlib_module_names and not is_wait


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return "" if name == "__main__" else name.partition(".")[0]


def keep_stacks(run: Storage, generation: int, worker: str, heading: str) -> None:
    """Take the stacks now, and write them below the heading, in the background, to
    `traces/g<generation>-<worker>.txt`."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    text = f"{when} UTC, {heading}\n{stacks()}"

    def write() -> None:
        with suppress(OSError):  # a reader sees that the file is missing
            run.write(f"{FOLDER}/g{generation}-{worker}.txt", text.encode())

    threading.Thread(target=write, name="traces").start()
