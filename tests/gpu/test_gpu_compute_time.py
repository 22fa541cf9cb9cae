"""Compute time on a GPU: a shared GPU takes longer for the same product."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from one_gpu import NEEDS_GPU

from actors.runtime.compute_time import compute_times
from actors.runtime.fault_spec import Fault
from actors.runtime.faults import FaultInjector

pytestmark = NEEDS_GPU
EVERY = 2


def reported_times(num_reports: int) -> list[float]:
    times = compute_times(EVERY, torch.device("cuda"))
    reports = []
    for step in range(1, EVERY * num_reports + 1):
        times.begin()
        places = times.ballot(step, 0, 1)
        times.end(step)
        reports += places
    return reports


def measure_alone_and_shared() -> tuple[float, float]:
    """Run in a separate process, since the kernels that occupy the GPU end only with it."""
    reported_times(3)  # the first products of a process choose their kernels
    alone = sorted(reported_times(5))[2]
    fault = Fault("slow", "w0", 1, factor=4.0)
    FaultInjector("w0", (fault,)).slow_down(1, torch.device("cuda"), lambda: None)
    return alone, sorted(reported_times(30))[15]


def test_shared_gpu_reports_a_longer_compute_time() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        alone, beside_others = pool.submit(measure_alone_and_shared).result(timeout=120)
    assert beside_others > 1.5 * alone
