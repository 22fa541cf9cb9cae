"""A loss that depends on how samples are grouped into microbatches is noted before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.run.plan import TrainRequest, make_plan

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def mean(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def summed(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


def contrastive(model, x, y):
    z = nn.functional.normalize(model(x), dim=1)
    return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))


def masked(model, x, y):
    return nn.functional.cross_entropy(model(x), y, ignore_index=0)


def noisy(model, x, y):
    return summed(model, x + torch.randn_like(x), y)


def fixed_size(model, x, y):
    return nn.functional.cross_entropy(model(x.view(4, 4)), y, reduction="sum")


def train(run):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(torch.randn(16, 4), torch.tensor([0, 1, 1, 2] * 4))
    model, optimizer, _ = run.prepare(model, optimizer, DataLoader(dataset, batch_size=4))
    for step in run.steps(6, microbatches=NUM_MICROBATCHES):
        with step:
            for x, y in step.batches():
                step.backward(LOSS(model, x, y), WEIGHT)
"""


def notes(
    folder: Path, loss: str, weight: str = "None", num_microbatches: int = 2
) -> tuple[str, ...]:
    script = folder / "script.py"
    text = SCRIPT.replace("LOSS", loss).replace("WEIGHT", weight)
    script.write_text(text.replace("NUM_MICROBATCHES", str(num_microbatches)))
    request = TrainRequest(
        recipe=f"{script}:train", storage=str(folder / "runs"), tries_script=True, workers="1"
    )
    return make_plan(request, 0).notes


@pytest.mark.parametrize("loss", ["summed", "contrastive", "masked"])
def test_loss_that_depends_on_the_grouping_is_noted_with_its_line(
    loss: str, tmp_path: Path
) -> None:
    [note] = notes(tmp_path, loss)
    line = SCRIPT.split("\n").index("                step.backward(LOSS(model, x, y), WEIGHT)") + 1
    assert note.startswith(f"{tmp_path}/script.py, line {line}: the loss of some samples")
    assert "\n" not in note


@pytest.mark.parametrize("loss", ["mean", "noisy", "fixed_size"])
def test_loss_that_is_a_mean_or_random_or_needs_its_size_is_not_noted(
    loss: str, tmp_path: Path
) -> None:
    assert not notes(tmp_path, loss)


def test_weights_and_whole_batches_make_the_loss_independent_of_the_grouping(
    tmp_path: Path,
) -> None:
    assert not notes(tmp_path, "masked", "(y != 0).sum()")
    assert not notes(tmp_path, "contrastive", num_microbatches=1)
