"""Recoveries on a busy machine under the default policy: no healthy worker is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from harness import run_in_processes
from run_checks import assert_no_step_repeated

from actors.runtime.fault_spec import Fault
from pipelines.run.options import policy_of
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

NUM_WORKERS = 5
SETTINGS = tiny().model_copy(
    update={"data": DataSettings(source="random", seq_len=16), "steps": 100_000}
)


@contextmanager
def busy_loops() -> Iterator[None]:
    """Run twice as many busy loops as there are cores."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_kills",
    [
        pytest.param(8, marks=pytest.mark.timeout(280)),
        pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_only_killed_workers_are_lost_under_load(tmp_path: Path, num_kills: int) -> None:
    """Members die one after the other; then each joining worker dies in its first step."""
    members = [Fault("kill", f"w{i}", 4 * i, "compute") for i in range(1, NUM_WORKERS)]
    joiners = [Fault("kill", f"w{i}", 0, "compute") for i in range(NUM_WORKERS, num_kills + 1)]
    policy = asdict(policy_of(SETTINGS, 1, NUM_WORKERS, "run"))
    with busy_loops():
        run = run_in_processes(
            tmp_path,
            SETTINGS,
            NUM_WORKERS,
            faults=(*members, *joiners),
            stop_after_losses=num_kills,
            node_of=lambda worker: f"node-of-{worker}",
            timeout_s=260.0 if num_kills < 100 else 7000.0,
            **{
                name: value
                for name, value in policy.items()
                if name not in ("min_workers", "max_workers")
            },
        )
    killed = {fault.worker for fault in (*members, *joiners)}
    lost = {line["worker"] for line in run.lines_of("WorkerLost")}
    assert lost <= killed, f"{sorted(lost - killed)} were healthy\n{run.story()}"
    assert not run.lines_of("StopWorker"), run.story()
    assert len(lost) == num_kills
    assert_no_step_repeated(run)
