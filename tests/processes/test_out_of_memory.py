"""Out of memory: the run continues under a layout that fits, or ends and names one."""

from __future__ import annotations

from pathlib import Path

from harness import run_in_processes

from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings, TransformerSettings

WIDE = tiny().model_copy(
    update={
        "model": TransformerSettings(dim=512, num_layers=2, hidden_dim=2048),
        "data": DataSettings(source="random", seq_len=32),
        "steps": 3,
    }
)
"""About 9 M parameters: 37 MB, and as much again for each of gradients and moments."""


def test_run_ends_and_names_a_fitting_layout_if_none_fits_its_workers(
    tmp_path: Path,
) -> None:
    outcome = run_in_processes(
        tmp_path / "run", WIDE, 2, layout="dp=2", program="low_memory:LowMemoryProgram"
    )
    assert outcome.stopped.outcome == "failed"
    raised = [line for line in outcome.lines_of("WorkerRaised") if line["kind"] == "memory"][-1]
    assert raised["held_bytes"] > 100e6 and raised["wanted_bytes"] > 0
    reason = outcome.stopped.reason
    assert f"it held {raised['held_bytes'] / 1e6:,.1f} MB" in reason
    assert "would fit" in reason and "fsdp=" in reason
    assert "allocate" in outcome.stopped.traceback


def test_run_continues_in_place_under_the_next_layout_that_fits(tmp_path: Path) -> None:
    outcome = run_in_processes(
        tmp_path / "run", WIDE, 2, layout="dp=2", program="small_devices:SmallDeviceProgram"
    )
    assert outcome.stopped.outcome == "completed", outcome.stopped.reason
    layouts = [line["layout"] for line in outcome.lines_of("Resume")]
    assert layouts == ["dp=2", "fsdp=2"]
    assert outcome.lines_of("WorkerLost") == []
    assert [row["step"] for row in outcome.metrics] == [1, 2, 3]
