"""A substitute thread is watched, timed and abandoned together with the thread it works for."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from test_loop import MODULE, declare, make_step

from actors.runtime.compute_time import ThreadClock
from actors.runtime.interruption import Interruption
from actors.runtime.substitute_thread import (
    computed_s,
    forget_substitute,
    stood_in_for,
    working_thread,
)
from actors.storage.errors import Interrupted
from pipelines.loop import Run
from pipelines.loop.loop import Loop

SPENT_S = 0.05


def spend(spent: threading.Event, over: threading.Event) -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < SPENT_S:
        torch.ones(64, 64).mm(torch.ones(64, 64))
    spent.set()
    over.wait()


def test_compute_time_includes_the_substitute() -> None:
    forget_substitute(threading.get_ident())  # left over from other tests
    spent, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=spend, args=[spent, over])
    clock, begun_s = ThreadClock(), computed_s()
    begun_by_clock_s = clock.now()
    thread.start()
    with stood_in_for(thread):
        assert working_thread(threading.get_ident()) == thread.ident
        spent.wait()
        assert computed_s() - begun_s >= SPENT_S
        assert clock.now() - begun_by_clock_s >= 0.9 * SPENT_S
    assert working_thread(threading.get_ident()) == threading.get_ident()
    over.set()
    thread.join()


def test_loop_is_abandoned_with_the_thread_that_waits_for_it() -> None:
    """A thread that wakes up after it was abandoned stops, though the run has continued."""
    interruption, go, errors = Interruption(), threading.Event(), []
    interruption.running_generation = 1

    def script(run: Run) -> None:
        declare(run)
        for step in run.steps(3):
            with step:
                go.wait()
                interruption.check()

    loop = Loop(script, 0)

    def train() -> None:
        with pytest.raises(Interrupted, match="abandoned"), interruption.leavable():
            try:
                loop.take(make_step(), MODULE)
            except Interrupted as error:
                errors.append(str(error))
                raise
        interruption.forget()

    thread = threading.Thread(target=train)
    thread.start()
    while not loop.is_busy:
        time.sleep(0.001)
    time.sleep(0.05)
    assert thread.ident is not None and interruption.leave(thread.ident)
    go.set()
    thread.join(10)
    assert errors == ["this thread was abandoned"]
    assert not interruption.is_left()
