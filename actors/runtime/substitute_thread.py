"""A thread that computes in the place of another, which waits for it meanwhile.

Who watches the one, times it or leaves it behind means both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class SubstituteThread:
    """Whom a thread lets compute, and whether it waits for that now."""

    thread: threading.Thread
    is_at_work: bool = False


_stand_ins: dict[int, SubstituteThread] = {}


@contextmanager
def stood_in_for(thread: threading.Thread) -> Iterator[None]:
    """The calling thread waits for what this one does."""
    me = threading.get_ident()
    stand_in = _stand_ins.get(me)
    if stand_in is None or stand_in.thread is not thread:
        stand_in = _stand_ins[me] = SubstituteThread(thread)
    stand_in.is_at_work = True
    try:
        yield
    finally:
        stand_in.is_at_work = False


def stand_in_of(ident: int) -> threading.Thread | None:
    """Who computes for this thread, now or at other times."""
    stand_in = _stand_ins.get(ident)
    return stand_in.thread if stand_in else None


def who_works(ident: int) -> int:
    """The thread that computes now: this one, or who stands in for it."""
    stand_in = _stand_ins.get(ident)
    if stand_in is None or not stand_in.is_at_work:
        return ident
    return stand_in.thread.ident or ident


def dismiss(ident: int) -> None:
    """This thread ends; another may get its number."""
    _stand_ins.pop(ident, None)


def computed_s() -> float:
    """Processor time of the calling thread and of who stands in for it."""
    spent_s = time.thread_time()
    thread = stand_in_of(threading.get_ident())
    if thread is not None and thread.is_alive() and thread.ident is not None:
        spent_s += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return spent_s
