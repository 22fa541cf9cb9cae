"""A substitute thread is watched, timed and abandoned with the thread that it works for."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from test_loop import declare, take

from actors.runtime.compute_time import ThreadClock
from actors.runtime.interruption import Interruption
from actors.runtime.substitute_thread import (
    computed_s,
    forget_substitute,
    substituted_by,
    working_thread,
)
from actors.storage.errors import Interrupted
from pipelines.loop import Run
from pipelines.loop.loop import Loop

SPENT_S = 0.05


def compute_then_wait(has_computed: threading.Event, may_end: threading.Event) -> None:
    start_s = time.thread_time()
    while time.thread_time() - start_s < SPENT_S:
        torch.ones(64, 64).mm(torch.ones(64, 64))
    has_computed.set()
    may_end.wait()


def test_compute_time_includes_the_substitute() -> None:
    forget_substitute(threading.get_ident())  # may remain from other tests
    has_computed, may_end = threading.Event(), threading.Event()
    thread = threading.Thread(target=compute_then_wait, args=[has_computed, may_end])
    clock, computed_before_s = ThreadClock(), computed_s()
    clock_before_s = clock.now()
    thread.start()
    with substituted_by(thread):
        assert working_thread(threading.get_ident()) == thread.ident
        has_computed.wait()
        assert computed_s() - computed_before_s >= SPENT_S
        assert clock.now() - clock_before_s >= 0.9 * SPENT_S
    assert working_thread(threading.get_ident()) == threading.get_ident()
    may_end.set()
    thread.join()


def test_loop_is_abandoned_with_the_thread_that_waits_for_it() -> None:
    """An abandoned thread that wakes up later stops, although the run has continued."""
    interruption, errors = Interruption(), []
    is_stuck, may_continue = threading.Event(), threading.Event()
    interruption.running_generation = 1

    def script(run: Run) -> None:
        declare(run)
        for step in run.steps(3):
            with step:
                is_stuck.set()
                may_continue.wait()
                interruption.check()

    loop = Loop(script, 0)

    def train() -> None:
        with pytest.raises(Interrupted, match="abandoned"), interruption.abandonable():
            try:
                take(loop)
            except Interrupted as error:
                errors.append(str(error))
                raise
        interruption.forget()

    thread = threading.Thread(target=train)
    thread.start()
    assert is_stuck.wait(10)
    time.sleep(0.05)
    assert thread.ident is not None and interruption.abandon(thread.ident)
    may_continue.set()
    thread.join(10)
    assert errors == ["this thread was abandoned"]
    assert not interruption.is_abandoned()
