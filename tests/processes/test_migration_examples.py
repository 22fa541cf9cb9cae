"""A converted trainer class and converted DDP script equal the scripts before, through kills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_pairs import EXAMPLES, MAX_CHANGED_LINES, count_lines
from harness import Outcome, run_in_processes
from loops import plain
from run_checks import assert_no_step_repeated
from test_conversions import Recorder

from actors.runtime.fault_spec import Fault
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.loop.script import script_of
from pipelines.run.recipes import load

ROOT = Path(__file__).parents[2]
IN_RUN_ORDER = Path(__file__).with_name("in_run_order.py")
DOCUMENTED = {"trainer_class": "from-lightning.md", "augmented_images": "from-torchrun.md"}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
KILLS = (Fault("kill", "w1", 8, "compute"), Fault("kill", "w3", 16, "vote"))
LOSS = re.compile(r"loss ([\d.]+)(?:, accuracy ([\d.]+))?")
HELD_OUT = re.compile(r"held-out (?:losses|accuracy) ([\d.]+)")
REL = 2e-4
"""Of float32 sums in another order, after 48 or 60 steps."""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_conversion_changes_as_few_lines_as_documented(name: str) -> None:
    new, gone = count_lines(name)
    assert new <= MAX_CHANGED_LINES
    page = " ".join((ROOT / "docs" / DOCUMENTED[name]).read_text().split())
    assert f"{new} lines are new, {gone} are gone" in page


def run_before(name: str, folder: Path, *launcher: str, **environment: str) -> str:
    """What the script before the conversion prints, in the sample order of a run."""
    done = subprocess.run(
        [sys.executable, *launcher, IN_RUN_ORDER, EXAMPLES / f"{name}_before.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    return done.stdout


def run_after(name: str, folder: Path, dtype: str = "float32", **environment: str) -> Outcome:
    """The converted script with four workers, of which two die, and then with another layout."""
    recipe = f"{EXAMPLES / name}_after.py:main"
    settings = script_of(load(recipe).function).settings
    eval_every = settings.steps // 2 if name == "augmented_images" else 0
    run = run_in_processes(
        folder / "run",
        settings.model_copy(update={"eval_every": eval_every, "dtype": dtype}),
        4,
        recipe=recipe,
        layout="dp=4",
        faults=KILLS,
        due=((22, LayoutRequested("shards", TargetLayout.parse("fsdp=2"))),),
        environment=environment,
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert_no_step_repeated(run)
    assert len(run.lines_of("WorkerLost")) == 2
    assert "fsdp=2" in run.lines_of("Resume")[-1]["layout"]
    return run


@pytest.mark.slow
def test_trainer_class_equals_the_one_before_and_keeps_the_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [float(loss) for loss, _ in LOSS.findall(run_before("trainer_class", tmp_path))]
    before = torch.load(tmp_path / "best.pt")
    (tmp_path / "best.pt").unlink()
    monkeypatch.chdir(tmp_path)
    run = run_after("trainer_class", tmp_path)
    assert len(expected) == 48 and expected[-1] < 0.7 * expected[0]
    assert list(run.losses().values()) == pytest.approx(expected, rel=REL, abs=2e-6)
    after = torch.load(tmp_path / "best.pt")
    assert after["step"] == before["step"]
    assert after["loss"] == pytest.approx(before["loss"], rel=REL)
    for tensor, wanted in zip(after["model"].values(), before["model"].values(), strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.soak
def test_ddp_script_equals_the_one_before(tmp_path: Path) -> None:
    """Two processes of torchrun print the losses of their halves of each batch."""
    printed = run_before("augmented_images", tmp_path, *TORCHRUN, AUGMENT="0")
    lines = [(float(loss), float(accuracy)) for loss, accuracy in LOSS.findall(printed)]
    steps = list(zip(lines[::2], lines[1::2], strict=True))  # a collective separates the steps
    losses = [(first + second) / 2 for (first, _), (second, _) in steps]
    assert len(losses) == 60 and losses[-1] < 0.5 * losses[0]
    run = run_after("augmented_images", tmp_path, AUGMENT="0")
    assert list(run.losses().values()) == pytest.approx(losses, rel=REL, abs=1e-5)
    reported = {
        row["step"]: row["reported"]["accuracy"] for row in run.metrics if "reported" in row
    }
    accuracies = [(first + second) / 2 for (_, first), (_, second) in steps]
    assert len(reported) >= 58, "a step in which a worker dies may lack its numbers"
    for step, accuracy in reported.items():
        assert accuracy == pytest.approx(accuracies[step - 1], abs=0.03)
    evaluated = [(e["loss"], e["metrics"][0][1]) for e in run.lines_of("Evaluated")]
    held_out = sorted({float(number) for number in HELD_OUT.findall(printed)})
    assert sorted(sum(evaluated, ())) == pytest.approx(held_out, abs=0.01)


@pytest.mark.soak
def test_augmented_run_with_kills_equals_the_plain_loop(tmp_path: Path) -> None:
    """Crops and flips included, although readers of other workers draw them again."""
    script = load(f"{EXAMPLES}/augmented_images_after.py:main").function
    script(recorder := DeclaredObjects())
    model, optimizer, loader = recorder.objects
    assert loader.dataset.augments and loader.num_workers == 2
    model = model.double()
    num_steps, num_microbatches = recorder.num_steps, recorder.num_microbatches
    expected = list(plain(model, optimizer, None, loader, num_steps, num_microbatches))
    run = run_after("augmented_images", tmp_path, "float64")
    assert list(run.losses().values()) == pytest.approx(expected, rel=1e-9)


class DeclaredObjects(Recorder):
    """A run without steps, which notes what the script prepares."""

    def evaluation(self, *_: object, **__: object) -> None:
        pass
