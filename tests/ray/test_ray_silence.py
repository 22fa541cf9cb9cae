"""A worker that cannot answer while its process runs: the agent of its node reports that, and the
controller waits."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from command_line import Command
from test_frozen_workers import agents_on_node_of
from test_ray_parity import train_on_nodes

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak]
STALL_S = 3
AGENT_START_S = 8.0
"""An agent starts 10 s after the worker of its node, and is queried once it has answered."""
RECIPE = """
import ctypes
from pathlib import Path
import torch
from pipelines.settings.recipe import Recipe
from pipelines.settings import TrainSettings

stalled = []

def loss(model, batch):
    if not stalled and Path({stall_file!r}).exists():
        stalled.append(True)
        ctypes.PyDLL(None).sleep({stall_s})
    return model(batch[0]).square().mean()

class Rows:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return (torch.full((256,), float(index)) / 64,)

def recipe():
    settings = TrainSettings(batch=8, microbatch=2, steps=100000, checkpoint={{"every": 0}})
    return Recipe(model, loss, optimizer, Rows, settings)

def model():
    return torch.nn.Linear(256, 256)

def optimizer(named):
    return torch.optim.SGD([tensor for _, tensor in named], lr=1e-3)
"""


def workers(command: Command) -> list[psutil.Process]:
    return [psutil.Process(line["pid"]) for line in command.lines("WorkerReady")]


def test_call_that_holds_the_gil_causes_no_abort(tmp_path: Path) -> None:
    stall_file, recipe = tmp_path / "go", tmp_path / "stalling.py"
    recipe.write_text(RECIPE.format(stall_file=str(stall_file), stall_s=STALL_S))
    train = [f"{recipe}:recipe", "--workers", "2:2", "--layout", "dp=2"]
    with train_on_nodes(tmp_path, *train, num_nodes=2) as command:
        command.wait_for_step(20)
        command.wait_until(
            lambda: any(map(agents_on_node_of, workers(command))), "the agent of the other node"
        )
        time.sleep(AGENT_START_S)
        stall_file.touch()
        began = time.time()
        command.wait_until(lambda: command.metrics()[-1]["time"] > began + STALL_S + 1.0, "steps")
        command.process.terminate()
        code, output = command.finish()
        assert code == 143, output
    assert max(line["step_s"] for line in command.metrics()) > STALL_S - 0.5, "the stall took place"
    for kind in ("WorkerSuspected", "Abort", "WorkerLost"):
        assert not command.lines(kind), command.lines(kind)
    assert "checkpoint.every=0: only the last step is saved" in output
