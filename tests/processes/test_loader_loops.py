"""A script's own loop over its loader equals the plain loop through deaths."""

from __future__ import annotations

from pathlib import Path

import loader_scripts
import loops
import pytest
import torch
from harness import run_in_processes
from run_checks import assert_no_step_repeated
from test_script_habits import run_habit

from pipelines.loop.script import FileScript, script_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["dp=4", "dp=2,fsdp=2", "dp=2,fsdp=2,zero=3"])
def test_loop_over_the_loader_is_the_plain_loop_through_deaths(layout: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, "by_loader", 3, layout=layout, module=loader_scripts)
    losses = [*loader_scripts.plain_by_loader()]
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    size, saved = loader_scripts.SIZE, sorted((tmp_path / "marks").glob("epoch-*.pt"))
    seen = set()
    for file in saved:
        epoch, values = int(file.name.split("-")[1]), torch.load(file)
        seen.add(epoch)
        numbers = values["numbers"].tolist()
        assert numbers == [*range(size)][-len(numbers) :]
        if len(numbers) == size:
            mean = sum(losses[(epoch - 1) * size : epoch * size]) / size
            assert float(values["mean"]) == pytest.approx(mean, rel=1e-6)
    assert seen == {*range(1, loader_scripts.EPOCHS + 1)}


def test_sums_of_losses_are_the_plain_loop_through_deaths(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "sums", layout="dp=4", module=loader_scripts)
    norms: list[float] = []
    losses = [*loader_scripts.plain_sums(norms)]
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    [seen] = [torch.load(file)["norms"] for file in (tmp_path / "marks").glob("norms-*.pt")]
    assert seen.tolist() == pytest.approx(norms[-len(seen) :], rel=1e-5)
    assert min(norms) < loader_scripts.MAX_NORM < max(norms)


def test_batch_of_one_microbatch_has_its_size_in_the_warm_up_too(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "whole_batches", 0, layout="dp=1", module=loader_scripts)
    assert len(run.losses()) == loader_scripts.SIZE


def test_batch_norm_is_that_of_microbatches_with_any_number_of_workers(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "normalized", layout="dp=4", module=loader_scripts)
    losses, models = zip(*loader_scripts.plain_normalized(), strict=True)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    [below] = [torch.load(file) for file in (tmp_path / "marks").glob("below-*.pt")]
    for name, value in models[-1].state_dict().items():
        torch.testing.assert_close(below[name], value, rtol=1e-9, atol=1e-12)


def test_file_without_a_function_is_a_script(tmp_path: Path) -> None:
    """Its global variables are set back where a step comes again, also `total`."""
    (marks := tmp_path / "marks").mkdir()
    file = str(Path(__file__).with_name("whole_file.py"))
    run = run_in_processes(
        tmp_path,
        script_of(FileScript(file)).settings,
        4,
        layout="dp=4",
        recipe=file,
        environment={loops.FOLDER: str(marks)},
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert_no_step_repeated(run)
    assert len(run.lines_of("WorkerLost")) == 2
    losses = [*loader_scripts.plain_by_loader()]
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    [below] = [torch.load(file) for file in marks.glob("below-*.pt")]
    assert float(below["total"]) == pytest.approx(sum(losses), rel=1e-6)
