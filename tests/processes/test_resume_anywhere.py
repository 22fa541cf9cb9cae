"""All processes are killed at once; the run resumes with other workers under another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_in_processes
from killed_run import run_until_killed
from run_checks import assert_each_sample_once

from pipelines.run.recipes import tiny
from pipelines.settings import CheckpointSettings, DataSettings

NUM_STEPS = 72
SESSIONS = (
    ("fsdp=4", 4),
    ("pp=2,fsdp=2", 4),
    ("dp=2,tp=2", 4),
    ("cp=2,dp=2", 4),
    ("dp=3", 3),
    ("tp=2", 2),
)
"""Layout and number of workers of each session except the last, which has one worker."""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_run_killed_six_times_resumes_each_time_under_another_layout(tmp_path: Path) -> None:
    settings = tiny().model_copy(
        update={
            "data": DataSettings(source="random", seq_len=16),
            "dtype": "float64",
            "steps": NUM_STEPS,
            "checkpoint": CheckpointSettings(every=4),
        }
    )
    undisturbed = run_in_processes(tmp_path / "undisturbed", settings, 1)
    folder = tmp_path / "killed"
    recorded = settings.model_copy(update={"record_samples": folder / "samples.jsonl"})
    num_lines: list[int] = []
    for number, (layout, workers) in enumerate(SESSIONS):
        lines = run_until_killed(folder, recorded, workers, layout, step=12 * number + 10)
        num_lines.append(len(lines))
    run = run_in_processes(folder, recorded, 1)
    assert run.stopped.outcome == "completed"
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)
    assert_each_sample_once(run, settings.batch)
    sources = [line["source"] for line in run.lines_of("Resharded")]
    assert sources == ["initial"] + ["checkpoint"] * len(SESSIONS)
    resumed = [line["step"] for line in run.lines_of("Resume")]
    checkpointed = {line["step"] for line in run.lines_of("Checkpointed")}
    assert all(step in checkpointed for step in resumed[1:]) and resumed == sorted(resumed)
    assert all(step > 12 * number for number, step in enumerate(resumed[2:])), resumed
