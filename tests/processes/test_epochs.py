"""Scripts with a loop over epochs equal the plain loop through deaths, also between epochs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import epoch_scripts
import loops
import pytest
import torch
from test_script_habits import run_habit

from pipelines.loop.prepared.data_source import source_of
from pipelines.loop.script import script_of
from pipelines.loop.state.errors import LoopMisused

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["dp=2,fsdp=2", "dp=4"])
def test_epochs_are_those_of_a_plain_loop_through_deaths(layout: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, "by_epochs", 3, layout=layout, module=epoch_scripts)
    losses, values = zip(*epoch_scripts.plain_by_epochs(), strict=True)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    marks = tmp_path / "marks"
    ends = {int(file.name.split("-")[1]): torch.load(file) for file in marks.glob("epoch-*.pt")}
    assert [*sorted(ends)] == [*range(epoch_scripts.EPOCHS)]
    [below], [groups] = marks.glob("below-*.pt"), marks.glob("groups-*.pt")
    assert torch.load(groups)["seen"].tolist() == [False, True]
    for epoch, saved in [*ends.items(), (epoch_scripts.EPOCHS - 1, torch.load(below))]:
        expected = values[epoch_scripts.SIZE * (epoch + 1) - 1]
        for name, value in saved.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", ["dp=2,fsdp=2", "dp=4"])
def test_code_at_the_top_of_an_epoch_counts_once_through_deaths(
    layout: str, tmp_path: Path
) -> None:
    run = run_habit(tmp_path, "begins_epochs", 3, layout=layout, module=epoch_scripts)
    losses = [loss for loss, _ in epoch_scripts.plain_by_epochs(first_factor=epoch_scripts.FACTOR)]
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    drawn: dict[int, set[tuple[float, ...]]] = {}
    for file in (tmp_path / "marks").glob("epoch-*.pt"):
        epoch, saved = int(file.name.split("-")[1]), torch.load(file)
        assert saved["counted"] == epoch + 1
        drawn.setdefault(epoch, set()).add(tuple(saved["drawn"].tolist()))
    assert [len(values) for values in drawn.values()] == [1] * epoch_scripts.EPOCHS
    assert len(set.union(*drawn.values())) == epoch_scripts.EPOCHS


def test_code_below_epochs_that_are_left_runs_on_one_worker(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "leaves_epochs", 3, layout="dp=4", module=epoch_scripts)
    losses, _ = zip(*epoch_scripts.plain_by_epochs(), strict=True)
    last = epoch_scripts.SIZE * (epoch_scripts.LEFT_AFTER + 1)
    assert list(run.losses().values()) == pytest.approx(losses[:last], rel=1e-9)
    marks = tmp_path / "marks"
    assert len([*marks.glob("below-*.pt")]) == 1
    numbers = [int(file.name.split("-")[1]) for file in marks.glob("epoch-*.pt")]
    assert sorted(numbers) == [1, 2, 3, 4, 5]


def test_last_epoch_may_be_left_before_its_last_step(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "leaves_last_epoch", 2, layout="dp=4", module=epoch_scripts)
    losses = [loss for loss, _ in epoch_scripts.plain_by_epochs(is_scheduled=False)]
    assert list(run.losses().values()) == pytest.approx(losses[:-2], rel=1e-9)
    marks = tmp_path / "marks"
    assert len([*marks.glob("below-*.pt")]) == 1
    assert {int(file.name.split("-")[1]) for file in marks.glob("epoch-*.pt")} == {*range(6)}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("leaves_within_epoch", "epoch 0 was left before its last step"),
        ("reads_epoch_twice", "epoch 0: its steps are iterated twice"),
    ],
)
def test_epoch_that_is_not_read_once_to_its_end_is_refused(
    name: str, reason: str, tmp_path: Path
) -> None:
    run = run_habit(tmp_path, name, 0, "user_error", layout="dp=2", module=epoch_scripts)
    assert reason in run.stopped.reason


def test_epochs_have_whole_steps_of_data_whose_length_is_known() -> None:
    script = script_of(epoch_scripts.by_epochs)
    assert script.settings.steps == loops.NUM_STEPS
    with pytest.raises(LoopMisused, match=r"run.epochs: the data have no known length"):
        script_of(epoch_scripts.unknown_length)
    with pytest.raises(LoopMisused, match=r"steps_per_epoch=0 must be a whole number from 1 on"):
        script_of(partial(epoch_scripts.unknown_length, steps_per_epoch=0))
    *_, loader = epoch_scripts.build(num_samples=99)
    source = source_of(loader).in_whole_steps(24)
    assert source.epoch_size == 96
    assert source.split(2).microbatch == loader.batch_size / 2
    with pytest.raises(LoopMisused, match=r"split_batches: the loader's batch_size=\d is no mult"):
        source.split(3)
    assert source.note_on_epochs(24) == (
        "99 samples are not a multiple of the 24 of a step: each epoch omits 3"
    )
