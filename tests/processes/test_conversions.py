"""Converted scripts: few lines change, and the results do not."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest
from harness import run_in_processes
from loops import plain
from run_checks import assert_no_step_repeated
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from actors.runtime.fault_spec import Fault
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.loop.prepared.loader_loop import parts_of_batch
from pipelines.loop.script import script_of

EXAMPLES = Path(__file__).parents[2] / "examples"
CONVERTED = {"accelerate": "main", "torch_trainer": "train_func"}
MAX_CHANGED_LINES = 14


def count_changed_lines(before: str, after: str) -> int:
    """The number of lines that differ, are removed or added; an indented line differs."""
    old, new = before.splitlines(), after.splitlines()
    changes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal")


@pytest.mark.parametrize("name", CONVERTED)
def test_conversion_changes_few_lines(name: str) -> None:
    before, after = (EXAMPLES / f"{name}_{version}.py" for version in ("before", "after"))
    assert 0 < count_changed_lines(before.read_text(), after.read_text()) <= MAX_CHANGED_LINES


class Recorder:
    """A run without steps, whose `prepare` returns its arguments."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def prepare(self, *objects: Any) -> Any:
        self.objects += objects
        return objects if len(objects) > 1 else objects[0]

    def steps(self, num_steps: int, microbatches: int) -> Iterator[None]:
        self.num_steps, self.num_microbatches = num_steps, microbatches
        return iter(())

    def epochs(self, num_epochs: int, microbatches: int) -> Iterator[None]:
        [loader] = [item for item in self.objects if isinstance(item, DataLoader)]
        return self.steps(num_epochs * (len(loader) // microbatches), microbatches)

    def range(self, num_epochs: int) -> Iterator[None]:
        [loader] = [item for item in self.objects if isinstance(item, DataLoader)]
        [model] = [item for item in self.objects if isinstance(item, nn.Module)]
        parts = parts_of_batch(loader.batch_size or 1, [model])
        self.objects.remove(loader)
        self.objects.append(DataLoader(loader.dataset, (loader.batch_size or 1) // parts))
        return self.steps(num_epochs * len(loader), parts)


def plain_losses(script: Any) -> list[float]:
    script(recorder := Recorder())

    def find_prepared(kind: type) -> Any:
        return next((obj for obj in recorder.objects if isinstance(obj, kind)), None)

    return list(
        plain(
            find_prepared(nn.Module).double(),
            find_prepared(Optimizer),
            find_prepared(LRScheduler),
            find_prepared(DataLoader),
            recorder.num_steps,
            recorder.num_microbatches,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("accelerate", marks=pytest.mark.soak), "torch_trainer"]
)
def test_converted_script_killed_twice_and_resized_equals_the_plain_loop(
    name: str, tmp_path: Path
) -> None:
    file, function = EXAMPLES / f"{name}_after.py", CONVERTED[name]
    script = runpy.run_path(str(file))[function]
    settings = script_of(script).settings.model_copy(update={"dtype": "float64"})
    run = run_in_processes(
        tmp_path,
        settings,
        4,
        recipe=f"{file}:{function}",
        layout="dp=4",
        faults=(Fault("kill", "w1", 8, "compute"), Fault("kill", "w3", 16, "vote")),
        due=((22, LayoutRequested("shards", TargetLayout.parse("fsdp=2"))),),
    )
    assert run.stopped.outcome == "completed", run.stopped
    expected = plain_losses(script)
    assert list(run.losses().values()) == pytest.approx(expected, rel=1e-9)
    assert_no_step_repeated(run)
    assert len(run.lines_of("WorkerLost")) == 2
    assert "fsdp=2" in run.lines_of("Resume")[-1]["layout"]
    assert expected[-1] < 0.7 * expected[0], "the loss falls"
