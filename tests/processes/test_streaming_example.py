"""The converted example of streamed text, Muon and AdamW equals the one before, through kills."""

from __future__ import annotations

import re
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from harness import run_in_processes
from run_checks import assert_no_step_repeated

from actors.runtime.fault_spec import Fault
from pipelines.loop.script import script_of
from pipelines.run.recipes import load

EXAMPLES = Path(__file__).parents[2] / "examples"
BEFORE, AFTER = EXAMPLES / "muon_stream_before.py", EXAMPLES / "muon_stream_after.py"
LINE = re.compile(r"step (\d+): loss ([\d.]+), accuracy ([\d.]+)")
MAX_CHANGED_LINES = 15


def changed_lines() -> int:
    """The lines of the example after the conversion that it did not have before."""
    before, after = BEFORE.read_text().splitlines(), AFTER.read_text().splitlines()
    matcher = SequenceMatcher(None, [line.strip() for line in before], [s.strip() for s in after])
    return sum(j2 - j1 for tag, _, _, j1, j2 in matcher.get_opcodes() if tag != "equal")


def test_conversion_changes_few_lines() -> None:
    assert changed_lines() <= MAX_CHANGED_LINES


def test_converted_script_equals_the_one_before(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, BEFORE], capture_output=True, text=True, check=True)
    expected = {
        int(step) + 1: (float(loss), float(accuracy))
        for step, loss, accuracy in LINE.findall(done.stdout)
    }
    name = f"{AFTER}:main"
    faults = (Fault("kill", "w1", 8, "compute"), Fault("kill", "w2", 20, "vote"))
    run = run_in_processes(
        tmp_path, script_of(load(name).function).settings, 3, layout="dp=3", recipe=name,
        faults=faults,
    )  # fmt: skip
    assert run.stopped.outcome == "completed", run.stopped
    assert_no_step_repeated(run)
    assert len(run.lines_of("WorkerLost")) == 2
    losses, accuracies = zip(*expected.values(), strict=True)
    assert len(losses) == 36
    assert list(run.losses().values()) == pytest.approx(losses, rel=0.01)
    for row in run.metrics:
        if "reported" in row:
            assert row["reported"]["accuracy"] == pytest.approx(
                accuracies[row["step"] - 1], abs=0.01
            )
    assert len([row for row in run.metrics if "reported" in row]) >= 34
