"""The time split of the steps of a real run, with slow samples and a slow worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import slow_samples
from harness import run_in_processes

from actors.runtime.fault_spec import Fault
from elastic.protocol.votes import SPLIT
from pipelines.observe.history.history import History, read_history
from pipelines.observe.history.run_folder import RunFolder

NUM_SAMPLES = 4
"""Of a step, on one worker."""
STEP_FLOPS = 3 * 2 * 2 * 256 * 1024 * slow_samples.SETTINGS.batch
"""Forward and backward: a product and a sum for each weight and sample."""


def train(folder: Path, *faults: Fault) -> History:
    run = run_in_processes(
        folder / "run",
        slow_samples.CUSTOM_SETTINGS,
        2,
        recipe=f"{slow_samples.__file__}:recipe",
        faults=faults,
    )
    assert run.stopped.outcome == "completed", run.stopped
    rows = run.metrics
    split_s = sum(sum(row[name] for name in SPLIT) for row in rows[1:])
    assert split_s == pytest.approx(rows[-1]["time"] - rows[0]["time"], abs=0.02)
    return read_history(RunFolder.of(folder, "run"))


def test_reading_on_the_training_thread_is_data_time(tmp_path: Path) -> None:
    history = train(tmp_path)
    times = history.step_time.run
    least_s = times.num_steps * NUM_SAMPLES * slow_samples.SAMPLE_S
    assert least_s <= times.data_s < 2 * least_s
    device = history.step_time.device
    assert device.step_flops == STEP_FLOPS
    speed = device.speed(times)
    assert speed["flops_per_token"] == STEP_FLOPS / slow_samples.SETTINGS.batch
    assert speed["mfu"] is None, "the peak of this machine is not known"


def test_waiting_for_a_slow_worker_is_no_compute_time(tmp_path: Path) -> None:
    """The injected slowness comes after the reduction, so its peer waits in the vote."""
    slow = Fault("slow", "w1", 1, factor=20.0)
    even, uneven = (
        train(tmp_path / name, *faults).step_time.run
        for name, faults in (("even", ()), ("uneven", (slow,)))
    )
    assert uneven.vote_s > 3 * even.vote_s
    assert uneven.compute_s < 3 * even.compute_s
