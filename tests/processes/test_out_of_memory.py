"""A worker that runs out of memory ends the run; the reason names a layout that fits."""

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


def test_out_of_memory_reports_the_bytes_and_a_layout_that_fits(tmp_path: Path) -> None:
    outcome = run_in_processes(
        tmp_path / "run", WIDE, 2, layout="dp=2", program="low_memory:LowMemoryProgram"
    )
    assert outcome.stopped.outcome == "failed"
    [raised] = [line for line in outcome.lines_of("WorkerRaised") if line["kind"] == "memory"]
    assert raised["held_bytes"] > 100e6 and raised["wanted_bytes"] > 0
    reason = outcome.stopped.reason
    assert f"it held {raised['held_bytes'] / 1e6:,.1f} MB" in reason
    assert "would fit" in reason and "fsdp=" in reason
    assert "allocate" in outcome.stopped.traceback
