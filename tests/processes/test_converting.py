"""The loops of docs/converting.md have the losses of one worker, through deaths."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import ROOT, blocks
from harness import Outcome, run_in_processes
from run_checks import assert_no_step_repeated

from actors.runtime.fault_spec import Fault
from pipelines.loop.script import script_of
from pipelines.run.recipes import load

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "converting.md"
FILES = {block.title: block.code for block in blocks(PAGE) if block.title}
QUICK = "walk.py"
"""Its environment, its replay buffer and its target network are in `run.keep`."""
NUM_STEPS = 40
KILLS = (Fault("kill", "w1", 8, "compute"), Fault("kill", "w2", 35, "vote"))


def train(folder: Path, name: str, num_workers: int, faults: tuple[Fault, ...]) -> Outcome:
    recipe = f"{folder / name}:main"
    settings = script_of(load(recipe).function).settings
    run = run_in_processes(
        folder / f"run-{num_workers}",
        settings.model_copy(update={"steps": NUM_STEPS}),
        num_workers,
        recipe=recipe,
        faults=faults,
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert len(run.lines_of("WorkerLost")) == len(faults), run.story()
    return run


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == QUICK else [pytest.mark.soak], id=name)
        for name in FILES
    ],
)
def test_losses_are_those_of_one_worker_through_deaths(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the scripts save their models there
    (tmp_path / name).write_text(FILES[name])
    expected = train(tmp_path, name, 1, ()).losses()
    run = train(tmp_path, name, 3, KILLS)
    assert_no_step_repeated(run)
    assert len(expected) == NUM_STEPS
    assert run.losses() == pytest.approx(expected, rel=1e-4, abs=1e-6)
