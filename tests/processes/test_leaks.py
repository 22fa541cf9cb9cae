"""Repeated generations leak nothing: kill-and-rejoin cycles in one surviving process."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import read_lines, run_in_processes

from actors.runtime.fault_spec import Fault
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

STEPS_BETWEEN_KILLS = 1
SETTINGS = tiny().model_copy(
    update={"data": DataSettings(source="random", seq_len=16), "steps": 100_000}
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "num_cycles",
    [pytest.param(10, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.soak)],
)
def test_repeated_kills_leak_no_resources(tmp_path: Path, num_cycles: int) -> None:
    """w0 survives all kills; each joining worker dies in the first step that it computes."""
    faults = tuple(Fault("kill", f"w{i}", 0, "compute") for i in range(1, num_cycles + 1))
    run = run_in_processes(
        tmp_path,
        SETTINGS,
        2,
        program="usage_program:UsageProgram",
        faults=faults,
        stop_after_losses=num_cycles,
        timeout_s=800.0,
        environment={"USAGE_FOLDER": str(tmp_path)},
    )
    assert len(run.lines_of("WorkerLost")) == num_cycles
    assert not run.lines_of("RolledBack")
    [survivor] = {line["pid"] for line in run.lines_of("WorkerReady") if line["worker"] == "w0"}
    usage = read_lines(tmp_path / f"usage-{survivor}.jsonl")
    alone = [line for line in usage if line["world_size"] == 1]
    early, late = alone[5], alone[-1]
    assert len(alone) >= num_cycles - 5
    assert late["num_fds"] <= early["num_fds"] + 2
    assert late["num_threads"] <= early["num_threads"] + 1
    assert late["num_modules"] == early["num_modules"] == 0
    assert late["memory_bytes"] <= early["memory_bytes"] * 1.1 + 20e6
