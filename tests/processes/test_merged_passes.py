"""Merged microbatches: training at any size equals a pass for each microbatch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from multiprocessing import set_forkserver_preload
from pathlib import Path

import merged_programs
import pytest
import torch
from harness import run_in_processes
from merged_programs import NUM_STEPS, PASSES_FILE, records_passes
from ranks import formed_groups, open_file_store
from test_replica import CPU, train
from torch.multiprocessing import start_processes

from actors.runtime.fault_spec import Fault
from elastic.geometry.layout import Layout
from elastic.geometry.sample_order import deal
from elastic.protocol.events import WorkerDraining
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings, TrainSettings
from pipelines.training.replica.warm_up import group_of_one

DROPOUT = tiny().model_copy(
    update={
        "model": tiny().model.model_copy(update={"dropout": 0.1}),
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "batch": 24,
        "steps": NUM_STEPS,
        "eval_every": NUM_STEPS,
        "eval_samples": 2,
    }
)
NUM_PROCESSES = 8
FEW_STEPS = 3
"""The first step's passes are single microbatches, the others are merged."""
LAYOUTS = (*(Layout(dp=size) for size in range(1, NUM_PROCESSES + 1)), Layout(dp=2, fsdp=2))


@dataclass(frozen=True)
class Case:
    """A model and its data; `recipe` is the function of a custom one."""

    settings: TrainSettings
    recipe: str = ""

    def kwargs(self, **changes: object) -> dict[str, object]:
        settings = self.settings.model_copy(update=changes).model_dump(mode="json")
        return {"settings": settings} | self.source

    @property
    def source(self) -> dict[str, str]:
        return {"recipe": f"{merged_programs.__file__}:{self.recipe}"} if self.recipe else {}


CASES = {
    "language model with dropout": Case(DROPOUT),
    "recipe with loss and count": Case(merged_programs.CUSTOM_SETTINGS, "counted"),
    "recipe with a loss for each sample": Case(merged_programs.CUSTOM_SETTINGS, "by_sample"),
    "recipe with dropout": Case(merged_programs.CUSTOM_SETTINGS, "dropout"),
}


def read_passes(file: Path) -> list[tuple[int, int, list[int]]]:
    """The passes that the workers recorded: step, world size, microbatches."""
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


def run_rank(world_rank: int, folder: Path) -> None:
    """Train each case under each layout that has this rank; the ranks share a file of passes."""
    torch.set_num_threads(1)
    store = open_file_store(folder, NUM_PROCESSES)
    for name, case in CASES.items():
        for layout in LAYOUTS:
            if world_rank >= layout.num_workers:
                continue
            os.environ[PASSES_FILE] = str(folder / f"{name}-{layout}.passes")
            program = records_passes(**case.kwargs(), device="cpu")
            with formed_groups(layout, store, f"{name}-{layout}", world_rank) as groups:
                trained = train(program, groups, FEW_STEPS)
            if world_rank == 0:
                (folder / f"{name}-{layout}.json").write_text(json.dumps(trained.losses))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged")
    set_forkserver_preload(["pipelines.run.program"])
    start_processes(run_rank, (folder,), NUM_PROCESSES, start_method="forkserver")
    return folder


@pytest.fixture(scope="module")
def single_losses() -> dict[str, list[float]]:
    """The losses of each case with a pass for each microbatch, in one process."""
    losses = {}
    for name, case in CASES.items():
        with group_of_one(CPU) as groups:
            program = TrainingProgram(**case.kwargs(pass_samples=1), device="cpu")
            losses[name] = train(program, groups, NUM_STEPS).losses
    return losses


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_replicas_of_each_size_equal_single_microbatches(
    folder: Path, single_losses: dict[str, list[float]], name: str, layout: Layout
) -> None:
    losses = json.loads((folder / f"{name}-{layout}.json").read_text())
    assert losses == pytest.approx(single_losses[name][:FEW_STEPS], rel=1e-9)
    passes = read_passes(folder / f"{name}-{layout}.passes")
    sizes = sorted(len(own) for step, _, own in passes if step > 1)
    of_ranks = sorted(len(own) for own in deal(24, layout.num_workers))
    assert sizes == sorted(of_ranks * (FEW_STEPS - 1)), "each rank runs one pass"


@pytest.mark.parametrize("name", CASES)
def test_run_with_kills_and_growth_equals_single_microbatches(
    name: str, tmp_path: Path, single_losses: dict[str, list[float]]
) -> None:
    """Two of five workers are killed and replaced; the workers that are new observe first."""
    case = CASES[name]
    run = run_in_processes(
        tmp_path / "run",
        case.settings,
        5,
        layout="dp=5",
        program="merged_programs:records_passes",
        environment={PASSES_FILE: str(tmp_path / "passes")},
        faults=(Fault("kill", "w2", 3, "compute"), Fault("kill", "w4", 5, "apply")),
        due=((9, WorkerDraining("w1", "shrinks")),),
        **case.source,
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert list(run.losses().values()) == pytest.approx(single_losses[name], rel=1e-9)
    passes = read_passes(tmp_path / "passes")
    assert max(len(own) for step, size, own in passes if size == 5 and step == 2) == 5
    assert {size for _, size, _ in passes} > {4, 5}
