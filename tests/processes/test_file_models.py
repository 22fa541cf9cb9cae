"""A script may make its model at the top of its file, and keep numbers by their names."""

from __future__ import annotations

import math
from pathlib import Path

import file_model_scripts
import pytest
import torch
from epoch_scripts import SIZE
from loops import NUM_STEPS
from script_habits import values_of
from test_script_habits import run_habit

pytestmark = pytest.mark.slow


def test_model_at_the_top_of_a_file_is_that_of_a_plain_loop_through_deaths(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "train", module=file_model_scripts)
    losses, model = file_model_scripts.plain_train()
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    worst, rises, best = [max(losses[k : k + SIZE]) for k in range(0, NUM_STEPS, SIZE)], 0, math.inf
    printed = []
    for epoch, loss in enumerate(worst):
        rises, best = rises + (loss > best), min(best, loss)
        printed.append(f"epoch {epoch}: {rises} rises")
    [file] = (tmp_path / "marks").glob("below-*.pt")
    saved = torch.load(file)
    assert saved.pop("counts").tolist() == pytest.approx([best, rises], rel=1e-9)
    plain_values = values_of(model)
    for name, value in saved.items():
        torch.testing.assert_close(value, plain_values[name], rtol=1e-9, atol=1e-12)
    assert (tmp_path / "marks" / "printed.txt").read_text().splitlines() == printed
