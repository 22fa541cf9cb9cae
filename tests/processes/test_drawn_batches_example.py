"""The converted example of a GPT on batches that a function draws equals the one before."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from example_pairs import EXAMPLES, run_after

from elastic.geometry.sample_order import keyed_seed
from pipelines.reading.pass_reader import seed_host

pytestmark = pytest.mark.slow

NAME = "nano_gpt"


def test_converted_gpt_equals_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script before draws by the seeds of the run's microbatches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    before = import_module(f"{NAME}_before")
    draw, drawn = before.get_batch, count()

    def get_batch(split: str) -> Any:
        if split == "train":
            seed_host(keyed_seed("batch", 0, next(drawn)))
        return draw(split)

    monkeypatch.setattr(before, "get_batch", get_batch)
    before.main()
    losses = [float(loss) for loss in re.findall(r": loss ([\d.]+)", capsys.readouterr().out)]
    weights = torch.load("gpt.pt")
    (folder := tmp_path / "run").mkdir()
    run = run_after(folder, NAME)
    assert len(losses) == 30
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-3)
    for name, weight in torch.load("gpt.pt").items():
        torch.testing.assert_close(weight, weights[name], rtol=0.02, atol=2e-3)
