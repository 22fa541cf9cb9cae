"""Survivors that Gloo does not wake: the training thread is abandoned, the worker stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from death_while_sending import DOOMED, FATAL_STEP
from harness import run_in_processes
from run_checks import assert_no_step_repeated, assert_survivors_kept
from torch.distributed import HashStore, ProcessGroup

from actors.distributed.backends.backend import backend_of, bare_group
from actors.distributed.meshes import connect_neighbours
from actors.distributed.stall import STALL_S, StallDetector, wait_for
from actors.runtime.interruption import Interruption
from actors.storage.errors import Interrupted
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

SETTINGS = tiny().model_copy(
    update={"data": DataSettings(source="random", seq_len=16), "dtype": "float64", "steps": 24}
)


@pytest.mark.parametrize("layout", [pytest.param("dp=4", marks=pytest.mark.slow), "dp=2,fsdp=2"])
def test_death_during_large_messages_loses_no_other_worker(tmp_path: Path, layout: str) -> None:
    undisturbed = run_in_processes(tmp_path / "undisturbed", SETTINGS, 1)
    run = run_in_processes(
        tmp_path / "run", SETTINGS, 4, layout=layout, program="death_while_sending:HalfSentProgram"
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert [line["worker"] for line in run.lines_of("WorkerLost")] == [DOOMED], run.story()
    assert_survivors_kept(run, {"w0", "w1", "w2"})
    assert_no_step_repeated(run)
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)
    assert FATAL_STEP in run.losses()


def start_threads(*calls: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def form_two_ranks() -> list[ProcessGroup]:
    store, groups = HashStore(), {}

    def form(rank: int) -> None:
        groups[rank] = bare_group(backend_of("cpu"), store, rank, 2, timedelta(seconds=60))

    for thread in start_threads(lambda: form(0), lambda: form(1)):
        thread.join()
    return [groups[0], groups[1]]


def test_neighbours_in_a_ring_are_connected_once_each() -> None:
    """On NCCL while groups form; two ranks are each other's neighbours on both sides."""
    groups = form_two_ranks()
    threads = start_threads(*(partial(connect_neighbours, g, torch.device("cpu")) for g in groups))
    for thread in threads:
        thread.join(20.0)
    assert not any(thread.is_alive() for thread in threads)
    message = torch.zeros(1)
    [receiving] = start_threads(lambda: wait_for(groups[0].recv([message], 1, 0)))
    wait_for(groups[1].send([torch.ones(1)], 0, 0))
    receiving.join(20.0)
    assert message.item() == 1.0, "nothing of the exchange is left over"


def test_only_a_thread_that_waits_for_peers_is_stalled() -> None:
    """One thread receives a message that is not sent yet, one computes, and one hangs."""
    first, second = form_two_ranks()
    message, end = torch.zeros(1), threading.Event()

    def compute() -> None:
        while not end.is_set():
            torch.ones(64, 64).mm(torch.ones(64, 64))

    threads = start_threads(lambda: wait_for(first.recv([message], 1, 0)), compute, end.wait)
    detectors = [StallDetector(thread) for thread in threads]
    start = time.monotonic()
    while time.monotonic() - start < 5 * STALL_S:
        is_stalled = [detector.lasts() for detector in detectors]
        time.sleep(0.02)
    end.set()
    wait_for(second.send([torch.ones(1)], 0, 0))
    for thread in threads:
        thread.join()
    assert is_stalled == [True, False, False]
    assert not any(detector.lasts() for detector in detectors)


def test_abandoned_thread_ends_only_by_an_interruption() -> None:
    interruption = Interruption()
    entered, may_continue, outcomes = threading.Event(), threading.Event(), []

    def train() -> None:
        try:
            with interruption.abandonable():
                entered.set()
                may_continue.wait()
            outcomes.append("went on")
        except Interrupted:
            outcomes.append("stopped")
        with pytest.raises(Interrupted):
            interruption.check()

    thread = threading.Thread(target=train)
    thread.start()
    entered.wait()
    ident = thread.ident or 0
    assert interruption.abandon(ident)
    assert not interruption.abandon(ident)
    may_continue.set()
    thread.join()
    assert outcomes == ["stopped"]


def test_thread_outside_a_leavable_section_is_not_abandoned() -> None:
    interruption = Interruption()
    assert not interruption.abandon(threading.get_ident())
    with interruption.abandonable():
        pass
    assert not interruption.abandon(threading.get_ident())
