"""Compute time counts the work of a worker and not its waits."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from actors.runtime.compute_time import ThreadClock, ThreadTimes
from actors.runtime.fault_spec import Fault
from actors.runtime.faults import FaultInjector

NUM_RANKS = 3


def compute_for(seconds: float) -> None:
    started_s = time.thread_time()
    while time.thread_time() < started_s + seconds:
        pass


def test_compute_time_counts_work_but_not_waits() -> None:
    clock = ThreadClock()
    before = clock.now()
    time.sleep(1.0)
    waited_s = clock.now() - before
    compute_for(0.3)
    worked_s = clock.now() - before - waited_s
    assert waited_s < 0.5 and worked_s > 0.29


def test_work_of_other_threads_does_not_count() -> None:
    clock = ThreadClock()
    other = threading.Thread(target=compute_for, args=(0.3,))
    before = clock.now()
    other.start()
    other.join()
    assert clock.now() - before < 0.2


def test_processor_time_is_used_without_schedstat(tmp_path: Path) -> None:
    """This thread may have had substitutes before, whose time counts for it."""
    clock = ThreadClock(tmp_path / "none")
    before = clock.now() - time.thread_time()
    compute_for(0.1)
    assert clock.now() - time.thread_time() == pytest.approx(before, abs=0.05)


def test_mean_compute_time_is_reported_at_the_index_of_the_rank() -> None:
    """The first step is excluded, since it does one-time work."""
    times, clock = ThreadTimes(every=3), ThreadClock()
    ballots, spent = [], []
    for step, seconds in enumerate((0.5, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1), start=1):
        before = clock.now()
        times.begin()
        compute_for(seconds)
        ballots.append(times.ballot(step, 1, NUM_RANKS))
        times.end(step)
        spent.append(clock.now() - before)
    assert [bool(ballot) for ballot in ballots] == [False, False, True, False, False, True, False]
    assert [ballot[0] for ballot in ballots if ballot] == [0.0, 0.0]
    first, second = (ballot[1] for ballot in ballots if ballot)
    assert first == pytest.approx(spent[1], rel=0.1, abs=0.02), "step 3 votes before it ends"
    assert second == pytest.approx(sum(spent[2:5]) / 3, rel=0.1, abs=0.02)


def test_nothing_is_reported_if_nothing_was_timed() -> None:
    assert ThreadTimes(every=1).ballot(1, 0, 2) == [0.0, 0.0]
    never = ThreadTimes(every=0)
    never.begin()
    never.end(1)
    assert never.ballot(1, 0, 2) == []


def test_slowed_worker_computes_longer_by_the_factor() -> None:
    faults = FaultInjector(
        "w1", (Fault("slow", "w1", 3, factor=4.0), Fault("slow", "w0", 1, factor=9.0))
    )
    spent = []
    for step in range(1, 8):
        started_s = time.thread_time()
        compute_for(0.05)
        faults.slow_down(step, torch.device("cpu"), lambda: None)
        spent.append(time.thread_time() - started_s)
    # In the third step the injector measures how long a step takes.
    assert max(spent[:3]) < 0.1 and min(spent[3:]) > 0.19
    assert all(later < 3 * earlier for earlier, later in pairwise(spent[3:]))
