"""Scripts with several models, such as a GAN, equal their plain loops through deaths."""

from __future__ import annotations

from pathlib import Path

import model_scripts
import pytest
import torch
from test_script_habits import run_habit

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("dp=2,fsdp=2", "gan"),
        ("dp=2,fsdp=2,zero=2", "gan"),
        ("dp=3", "gan"),
        ("dp=3", "gan_with_readers"),
    ],
)
def test_models_of_a_gan_are_stepped_in_turn_on_the_same_batch(
    layout: str, name: str, tmp_path: Path
) -> None:
    run = run_habit(tmp_path, name, layout=layout, module=model_scripts)
    losses, values = zip(*model_scripts.plain_gan(), strict=True)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    files = list((tmp_path / "marks").glob("both-*.pt"))
    assert len(files) == 4
    for file in files:
        expected = values[int(file.name.split("-")[1]) - 1]
        saved = torch.load(file)
        assert saved.keys() == expected.keys()
        for name, value in saved.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", ["dp=3", "dp=2,fsdp=2,zero=2"])
def test_models_may_share_parts(layout: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, "sharing", layout=layout, module=model_scripts)
    losses = list(model_scripts.plain_sharing())
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)


def test_shared_parts_are_not_fully_sharded(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "sharing", 0, "user_error", "fsdp=2", module=model_scripts)
    assert "several models have the parameter body.weight, which fsdp" in run.stopped.reason


def test_models_with_one_loss_are_evaluated_together(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "one_loss", module=model_scripts)
    losses, held_out = zip(*model_scripts.plain_one_loss(), strict=True)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    files = list((tmp_path / "marks").glob("held-*.pt"))
    assert len(files) == 4
    for file in files:
        expected = held_out[int(file.name.split("-")[1]) - 1]
        assert float(torch.load(file)["loss"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("calls_after_its_optimizer", "step 1: the model is called after optimizer.step()"),
        ("steps_outside", "optimizer.step() outside of `with step:`: with several optimizers"),
        ("reads_twice", "step 1: `step.batches()` is iterated twice"),
        ("steps_by_worker", "or have stepped different optimizers: decide these by"),
    ],
)
def test_updates_that_would_differ_from_a_plain_loop_are_refused(
    name: str, reason: str, tmp_path: Path
) -> None:
    run = run_habit(tmp_path, name, 0, "user_error", layout="dp=2", module=model_scripts)
    assert reason in run.stopped.reason
