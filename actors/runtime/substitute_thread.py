"""Substitute threads: a thread that computes for another one, which waits for it meanwhile.

A custom training loop runs in a thread of its own while the training thread waits for it. Code that
watches, times or abandons the training thread must cover both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class SubstituteThread:
    """The substitute of a thread, and whether that thread waits for it now."""

    thread: threading.Thread
    is_at_work: bool = False


_substitutes: dict[int, SubstituteThread] = {}
"""By the ident of the waiting thread."""


@contextmanager
def substituted_by(thread: threading.Thread) -> Iterator[None]:
    """While inside, `thread` computes for the calling thread, which waits for it."""
    me = threading.get_ident()
    substitute = _substitutes.get(me)
    if substitute is None or substitute.thread is not thread:
        substitute = _substitutes[me] = SubstituteThread(thread)
    substitute.is_at_work = True
    try:
        yield
    finally:
        substitute.is_at_work = False


def substitute_of(ident: int) -> threading.Thread | None:
    """The last substitute of a thread, whether it computes now or not."""
    substitute = _substitutes.get(ident)
    return substitute.thread if substitute else None


def working_thread(ident: int) -> int:
    """The ident of the thread that computes now: this thread, or its substitute."""
    substitute = _substitutes.get(ident)
    if substitute is None or not substitute.is_at_work:
        return ident
    return substitute.thread.ident or ident


def forget_substitute(ident: int) -> None:
    """Called when a thread ends: another thread may get its ident."""
    _substitutes.pop(ident, None)


def computed_s() -> float:
    """Processor time of the calling thread and its substitute."""
    spent_s = time.thread_time()
    thread = substitute_of(threading.get_ident())
    if thread is not None and thread.is_alive() and thread.ident is not None:
        spent_s += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return spent_s
