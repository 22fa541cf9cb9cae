"""What a script draws outside of its microbatches is the same on all workers, also after deaths."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import drawing_scripts
import loops
import pytest
from harness import run_in_processes
from run_checks import assert_no_step_repeated

from pipelines.loop.script import script_of

pytestmark = pytest.mark.slow


def test_draws_are_those_of_the_step_on_every_worker(tmp_path: Path) -> None:
    """Workers have different numbers of microbatches, and two die in the body of a step. Both the
    run and the script evaluate, which reads other samples on each worker."""
    (marks := tmp_path / "marks").mkdir()
    settings = script_of(drawing_scripts.train).settings.model_copy(update={"eval_every": 5})
    run = run_in_processes(
        tmp_path / "run",
        settings,
        4,
        layout="dp=4",
        recipe=f"{drawing_scripts.__file__}:train",
        environment={loops.FOLDER: str(marks)},
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert_no_step_repeated(run)
    assert len(run.lines_of("WorkerLost")) == 2
    drawn = defaultdict(list)
    for file in marks.glob("drawn-*"):
        drawn[int(file.name.split("-")[1])].append(json.loads(file.read_text()))
    assert drawn.keys() == set(range(1, loops.NUM_STEPS + 1))
    for step, (first, *others) in drawn.items():
        assert others and all(other == first for other in others), step
        assert len({number for moment in first for number in moment}) == 12, "no moment repeats one"
    factors = {step: first[1][0] for step, (first, *_) in drawn.items()}
    expected = list(drawing_scripts.plain_losses(factors))
    assert list(run.losses().values()) == pytest.approx(expected, rel=1e-9)
    lost_at = {line["step"] + 1 for line in run.lines_of("Resume")}
    reported = {row["step"]: row["reported"] for row in run.metrics if "reported" in row}
    assert reported.keys() >= set(range(1, loops.NUM_STEPS + 1)) - lost_at
    num_samples = loops.NUM_MICROBATCHES * loops.MICROBATCH
    assert all(row == {"seen": num_samples} for row in reported.values()), "padding does not count"
