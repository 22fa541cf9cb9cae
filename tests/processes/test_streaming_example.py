"""The converted example of streamed text, Muon and AdamW equals the one before, through kills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_pairs import output_before, run_after

pytestmark = pytest.mark.slow

NAME = "muon_stream"
LINE = re.compile(r"step (\d+): loss ([\d.]+), accuracy ([\d.]+)")


def test_converted_script_equals_the_one_before(tmp_path: Path) -> None:
    expected = {
        int(step) + 1: (float(loss), float(accuracy))
        for step, loss, accuracy in LINE.findall(output_before(NAME))
    }
    run = run_after(tmp_path, NAME)
    losses, accuracies = zip(*expected.values(), strict=True)
    assert len(losses) == 36
    assert list(run.losses().values()) == pytest.approx(losses, rel=0.01)
    for row in run.metrics:
        if "reported" in row:
            assert row["reported"]["accuracy"] == pytest.approx(
                accuracies[row["step"] - 1], abs=0.01
            )
    assert len([row for row in run.metrics if "reported" in row]) >= 34
