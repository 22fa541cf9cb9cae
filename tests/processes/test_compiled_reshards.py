"""Compiled blocks train equally under fsdp and tp, and a reshard compiles only new shapes."""

from __future__ import annotations

import json
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import formed_groups, open_file_store
from test_replica import program_of, train
from torch._dynamo.utils import counters
from torch.multiprocessing import start_processes

from elastic.geometry.layout import Layout
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

NUM_PROCESSES = 4
NUM_STEPS = 2
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "batch": 8,
        "pass_samples": 1,
        "eval_every": 1,
        "eval_samples": 3,
    }
)
GENERATIONS = (
    "fsdp=4,zero=3",
    "fsdp=3,zero=3",
    "fsdp=4,zero=3",
    "fsdp=2,tp=2",
    "dp=2,tp=2",
    "fsdp=4,zero=2",
)
COMPILING_GENERATIONS = {0, 3} if torch.__version__ < (2, 15) else {0, 3, 4, 5}
"""The first, and the first with `tp`, whose blocks have other shapes.

From torch 2.15 on Dynamo also guards a module's class, which FSDP replaces: a reshard that changes
between stage 3 and another compiles the first time.
"""


def run_rank(world_rank: int, folder: Path) -> None:
    """Train each generation that has this rank, first plain and then compiled."""
    torch.set_num_threads(1)
    store = open_file_store(folder, NUM_PROCESSES)
    results: list[dict[str, Any] | None] = []
    for number, text in enumerate(GENERATIONS):
        layout = Layout.parse(text)
        if world_rank >= layout.num_workers:
            results.append(None)
            continue
        losses = []
        counters.clear()
        for compiled in (False, True):
            program = program_of(SETTINGS.model_copy(update={"compile": compiled}))
            with formed_groups(layout, store, f"{number} {compiled}", world_rank) as groups:
                losses.append(train(program, groups, NUM_STEPS).losses)
        results.append({"losses": losses, "num_graphs": counters["stats"]["unique_graphs"]})
    (folder / f"{world_rank}.json").write_text(json.dumps(results))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_reshard_compiles_only_shapes_that_are_new(tmp_path: Path) -> None:
    set_forkserver_preload(["pipelines.run.program"])
    start_processes(run_rank, (tmp_path,), NUM_PROCESSES, start_method="forkserver")
    for world_rank in range(NUM_PROCESSES):
        results = json.loads((tmp_path / f"{world_rank}.json").read_text())
        for number, result in enumerate(results):
            if result is None:
                continue
            plain, compiled = result["losses"]
            assert compiled == pytest.approx(plain, rel=1e-9)
            has_compiled = result["num_graphs"] > 0
            assert has_compiled == (number in COMPILING_GENERATIONS), GENERATIONS[number]
