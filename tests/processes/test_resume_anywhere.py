"""Everything is killed at once, and the run goes on elsewhere: another number, another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_plainly
from killed_whole import run_until_killed
from run_checks import assert_each_sample_once

from pipelines.run.recipes import tiny
from pipelines.settings import CheckpointSettings, DataSettings

NUM_STEPS = 72
COURSE = (
    ("fsdp=4", 4),
    ("pp=2,fsdp=2", 4),
    ("dp=2,tp=2", 4),
    ("cp=2,dp=2", 4),
    ("dp=3", 3),
    ("tp=2", 2),
)
"""Layout and workers of each life but the last, which has one worker."""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_six_times_and_each_time_on_under_another_layout(tmp_path: Path) -> None:
    settings = tiny().model_copy(
        update={
            "data": DataSettings(source="random", seq_len=16),
            "dtype": "float64",
            "steps": NUM_STEPS,
            "checkpoint": CheckpointSettings(every=4),
        }
    )
    undisturbed = run_plainly(tmp_path / "undisturbed", settings, 1)
    folder = tmp_path / "killed"
    recorded = settings.model_copy(update={"record_samples": folder / "samples.jsonl"})
    seen: list[int] = []
    for number, (layout, workers) in enumerate(COURSE):
        lines = run_until_killed(folder, recorded, workers, layout, step=12 * number + 10)
        seen.append(len(lines))
    run = run_plainly(folder, recorded, 1)
    assert run.stopped.outcome == "completed"
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)
    assert_each_sample_once(run, settings.batch)
    sources = [line["source"] for line in run.told("Resharded")]
    assert sources == ["initial"] + ["checkpoint"] * len(COURSE)
    resumed = [line["step"] for line in run.told("Resume")]
    newest = {line["step"] for line in run.told("Checkpointed")}
    assert all(step in newest for step in resumed[1:]) and resumed == sorted(resumed)
    assert all(step > 12 * number for number, step in enumerate(resumed[2:])), resumed
