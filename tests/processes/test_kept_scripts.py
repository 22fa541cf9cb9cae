"""What a script keeps from step to step is part of the run's state."""

from __future__ import annotations

from pathlib import Path

import kept_scripts
import loops
import pytest
import torch
from harness import Outcome, run_in_processes
from test_script_habits import run_habit

from pipelines.loop.script import script_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["dp=2,fsdp=2", "dp=3"])
def test_kept_objects_are_those_of_a_plain_loop_through_deaths(layout: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, "follows", layout=layout, module=kept_scripts)
    losses, averaged = zip(*kept_scripts.plain_follows(), strict=True)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    [file] = (tmp_path / "marks").glob("averaged-*.pt")
    saved = torch.load(file)
    assert saved.keys() == averaged[-1].keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, averaged[-1][name], rtol=1e-9, atol=1e-12)


def run_with_standbys(folder: Path, name: str) -> Outcome:
    """Two workers stand by and take the places of those that die at once, also that of rank 0."""
    (folder / "marks").mkdir()
    return run_in_processes(
        folder,
        script_of(getattr(kept_scripts, name)).settings,
        4,
        layout="dp=2",
        recipe=f"{kept_scripts.__file__}:{name}",
        environment={loops.FOLDER: str(folder / "marks")},
    )


def test_first_worker_is_the_one_that_has_trained_for_longest(tmp_path: Path) -> None:
    run = run_with_standbys(tmp_path, "first_dies")
    assert run.stopped.outcome == "completed", run.stopped
    assert len(run.lines_of("WorkerLost")) == 2
    marks = tmp_path / "marks"
    files = [*marks.glob("seen-*.pt"), *marks.glob("below-*.pt")]
    seen = {int(file.name.split("-")[1]): int(torch.load(file)["steps"]) for file in files}
    assert {number: seen[number] for number in range(1, 16)} == {n: n for n in range(1, 16)}
    assert max(seen) == loops.NUM_STEPS


def test_resumed_run_has_the_kept_objects(tmp_path: Path) -> None:
    recipe = f"{kept_scripts.__file__}:follows"
    settings = script_of(kept_scripts.follows).settings
    for steps in (11, loops.NUM_STEPS):
        some = settings.model_copy(update={"steps": steps})
        run = run_in_processes(tmp_path, some, 2, layout="fsdp=2", recipe=recipe)
        assert run.stopped.outcome == "completed", run.stopped
    losses, _ = zip(*kept_scripts.plain_follows(), strict=True)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)


def test_break_keeps_what_the_last_step_has_changed(tmp_path: Path) -> None:
    (marks := tmp_path / "marks").mkdir()
    recipe = f"{kept_scripts.__file__}:stops_early"
    settings = script_of(kept_scripts.stops_early).settings
    for last_step in (5, 7):
        run = run_in_processes(
            tmp_path, settings, 2, layout="dp=2", recipe=recipe,
            environment={loops.FOLDER: str(marks)},
        )  # fmt: skip
        assert (run.stopped.outcome, run.stopped.step) == ("completed", last_step)
        for file in marks.glob(f"counts-{last_step}-*.pt"):
            assert torch.load(file)["updates"] == last_step
    assert len(list(marks.glob("counts-*.pt"))) == 4


def test_variable_that_a_new_worker_lacks_is_explained(tmp_path: Path) -> None:
    run = run_with_standbys(tmp_path, "sets_in_first_step")
    assert run.stopped.outcome == "user_error", run.stopped
    reason = run.stopped.reason
    assert f"{kept_scripts.__file__}, line" in reason
    assert "variable 'best'" in reason and "this worker has begun at step 8" in reason
    assert "set them before the loop" in reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("follows_its_own_loss", "step 2: the scripts of the workers have different learning rate"),
        ("keeps_its_own_loss", "step 2: the scripts of the workers have different learning rates"),
        ("adds_later", "run.keep: hidden was added or removed in the loop"),
    ],
)
def test_state_that_cannot_be_shared_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, name, 0, "user_error", layout="dp=2", module=kept_scripts)
    assert reason in run.stopped.reason
