"""The parts of a step's time: what is computed, waited for, and everything else."""

from __future__ import annotations

import time

import pytest
import torch

from actors.runtime.program import Waits
from actors.worker.step_timer import StepTimer

CPU = torch.device("cpu")
SLEEP_S = 0.2


class Waiting:
    """A program's waits, of which the test adds some."""

    def __init__(self) -> None:
        self.total = Waits()

    def read(self, seconds: float) -> None:
        began_s, busy_s = time.perf_counter(), time.thread_time()
        time.sleep(seconds)
        spent_s, busy_s = time.perf_counter() - began_s, time.thread_time() - busy_s
        self.total = Waits(self.total.data_s + spent_s, self.total.data_asleep_s + spent_s - busy_s)


def compute(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_sleep_while_computing_is_communication_unless_it_is_for_data() -> None:
    waiting = Waiting()
    timer = StepTimer(CPU, lambda: waiting.total)
    began_s = time.perf_counter()
    with timer.computing():
        compute(SLEEP_S)
        time.sleep(2 * SLEEP_S)  # for another worker
        waiting.read(SLEEP_S)
    with timer.part("vote_s"):
        time.sleep(SLEEP_S)
    time.sleep(SLEEP_S)
    split = timer.split()
    assert sum(split.values()) == pytest.approx(time.perf_counter() - began_s, abs=0.01)
    assert split["communication_s"] == pytest.approx(2 * SLEEP_S, abs=0.1)
    assert split["data_s"] == pytest.approx(SLEEP_S, abs=0.1)
    assert split["compute_s"] >= SLEEP_S
    assert split["vote_s"] >= SLEEP_S and split["other_s"] >= SLEEP_S
    assert split["snapshot_s"] == 0.0


def test_time_before_the_first_part_does_not_count() -> None:
    timer = StepTimer(CPU, Waits)
    time.sleep(SLEEP_S)
    with timer.part("vote_s"):
        pass
    assert sum(timer.split().values()) < SLEEP_S


def test_each_split_begins_where_the_last_one_ended() -> None:
    timer = StepTimer(CPU, Waits)
    with timer.part("snapshot_s"):
        time.sleep(SLEEP_S)
    assert timer.split()["snapshot_s"] >= SLEEP_S
    assert sum(timer.split().values()) < SLEEP_S


def test_waits_never_exceed_the_time_in_which_they_occurred() -> None:
    waits = iter((Waits(), Waits(data_s=10.0)))
    timer = StepTimer(CPU, lambda: next(waits))
    with timer.computing():
        pass
    split = timer.split()
    assert split["compute_s"] >= 0.0 and sum(split.values()) < 1.0
