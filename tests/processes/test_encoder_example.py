"""The converted fine-tuning of an encoder equals the one before, through kills and a resize."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_pairs import EXAMPLES, run_after
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested

NAME = "encoder"
RESIZE = (28, LayoutRequested("shards", TargetLayout.parse("fsdp=2")))
ACCURACY = re.compile(r"held-out accuracy ([\d.]+)")
NUM_HELD_OUT = 250
WEIGHTS = Path(NAME) / "model.safetensors"


def accuracies_of(text: str) -> list[float]:
    """After each of three epochs, and of the trained model."""
    return [float(number) for number in ACCURACY.findall(text)]


@pytest.mark.soak
def test_converted_encoder_equals_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accuracies are those of all held-out samples, whose number no batch size divides."""
    monkeypatch.chdir(tmp_path)
    root = EXAMPLES.parent
    printed = subprocess.run(
        [sys.executable, root / "tests/processes/in_run_order.py", EXAMPLES / f"{NAME}_before.py"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(root), "DROPOUT": "0"},
    ).stdout
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)", printed, re.MULTILINE)]
    expected, weights = accuracies_of(printed), load_file(WEIGHTS)
    WEIGHTS.unlink()
    run = run_after(tmp_path / "run", NAME, num_workers=4, due=(RESIZE,), DROPOUT="0")
    assert "fsdp=2" in run.lines_of("Resume")[-1]["layout"]
    assert len(losses) == 48 and losses[-1] < 0.65 * losses[0]
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-3)
    *during, after = expected
    assert len(during) == 3 and after == during[-1] > 0.7
    reported = {row["step"]: row["reported"] for row in run.metrics if "reported" in row}
    accuracies = [reported[step]["held_out_accuracy"] for step in (16, 32, 48)]
    assert accuracies == pytest.approx(during, abs=2.1 / NUM_HELD_OUT)
    script = runpy.run_path(str(EXAMPLES / f"{NAME}_after.py"))
    held_out = script["Sentences"](script["NUM_TRAINED"], NUM_HELD_OUT)
    trained = BertForSequenceClassification.from_pretrained(NAME)
    assert script["evaluate"](trained, held_out) == pytest.approx(accuracies[-1], abs=1e-6)
    for name, weight in load_file(WEIGHTS).items():
        torch.testing.assert_close(weight, weights[name], rtol=0.02, atol=2e-3)
