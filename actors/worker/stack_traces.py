"""Stack traces of a worker's threads, written to the run folder when a worker hangs."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import suppress

from actors.storage.storage import Storage

FOLDER = "traces"


def stacks() -> str:
    """The stack of each thread of this process, the newest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sys._current_frames().items():
        texts.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(texts)


def keep_stacks(run: Storage, worker: str, generation: int, cause: str) -> None:
    """Take the stacks now, and write them in the background to
    `traces/g<generation>-<worker>.txt`."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    text = f"{worker} in generation {generation}, {when} UTC: {cause}\n\n{stacks()}"

    def write() -> None:
        with suppress(OSError):  # a reader sees that the file is missing
            run.write(f"{FOLDER}/g{generation}-{worker}.txt", text.encode())

    threading.Thread(target=write, name="traces").start()
