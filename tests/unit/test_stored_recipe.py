"""A command that is refused does not change the recipe of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_bad_input import expect_refusal

from actors.controller.run import RunSpec
from actors.storage.errors import RunTaken
from actors.storage.lease import claim
from actors.storage.storage import open_storage
from pipelines.run import drive
from pipelines.run.plan import TrainRequest, make_plan, store_recipe


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 5 steps."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    store_recipe(make_plan(make_request(tmp_path, 5), num_gpus=0))
    return tmp_path / "run"


@pytest.fixture
def driven_run(run: Path) -> Iterator[Path]:
    """A run that another process drives."""
    code = (
        "import sys; from actors.storage.lease import claim\n"
        "from actors.storage.storage import open_storage\n"
        "claim(open_storage(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    owner.stdout.readline()
    yield run
    owner.kill()
    owner.communicate()


def make_request(storage: Path, steps: int) -> TrainRequest:
    return TrainRequest("tiny", "run", str(storage), "1", None, steps, None, "random")


def stored_steps(run: Path) -> int:
    return json.loads((run / "recipe.json").read_text())["steps"]


def test_in_process_run_driven_by_another_process_keeps_its_recipe(
    driven_run: Path, capsys
) -> None:
    arguments = ["tiny", "--in-process", "--run-name", "run", "--storage", str(driven_run.parent)]
    line = expect_refusal(capsys, "train", *arguments, "--data", "random", "--steps", "9")
    assert "drives this run" in line
    assert stored_steps(driven_run) == 5


class Controller:
    """A substitute for `Drive` that claims the run or is refused."""

    stored_steps_at_start: int

    def __init__(self, run: RunSpec) -> None:
        self.stored_steps_at_start = stored_steps(Path(run.folder))
        claim(open_storage(run.folder)).release()


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "Drive", Controller)


def test_run_on_ray_driven_by_another_process_keeps_its_recipe(
    driven_run: Path, without_ray
) -> None:
    plan = make_plan(make_request(driven_run.parent, 9), num_gpus=0)
    with pytest.raises(RunTaken):
        drive._begin(plan, plan.run)
    assert stored_steps(driven_run) == 5


def test_controller_that_starts_finds_the_new_recipe(run: Path, without_ray) -> None:
    plan = make_plan(make_request(run.parent, 9), num_gpus=0)
    assert drive._begin(plan, plan.run).stored_steps_at_start == 9


def test_recipe_is_stored_once_the_controller_has_the_run(
    driven_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous driver may end between the check and the claim."""

    class Patient(Controller):
        def __init__(self, run: RunSpec) -> None:
            for file in (driven_run / "lease").iterdir():
                file.unlink()
            super().__init__(run)

    monkeypatch.setattr(drive, "Drive", Patient)
    plan = make_plan(make_request(driven_run.parent, 9), num_gpus=0)
    assert drive._begin(plan, plan.run).stored_steps_at_start == 5
    assert stored_steps(driven_run) == 9
