"""A program that trains by `ElasticTrainer`: its module has the same effects on each worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import PATIENCE_S, ROOT, assert_no_process_left, ray_folder, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """
import sys
import torch
from pipelines.api import ElasticTrainer
from ray.train import RunConfig, ScalingConfig
from net import Net

SCALE = float(sys.argv[2])
torch.set_default_dtype(torch.float64)
torch.nn.functional.gelu = torch.nn.functional.relu


def main(run):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(16, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(6, microbatches=4):
        with step:
            for (points,) in step.batches():
                assert torch.get_default_dtype() == torch.float64
                assert torch.nn.functional.gelu is torch.nn.functional.relu
                step.backward(SCALE * model(points).square().mean())


if __name__ == "__main__":
    ElasticTrainer(
        main,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="mine", storage_path=sys.argv[1]),
        set={"dtype": "float64"},
    ).fit()
"""
NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, points):
        return self.layer(points)
"""


@pytest.mark.soak
def test_settings_patches_arguments_and_siblings_of_a_program_reach_workers(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "net.py").write_text(NET)
    with ray_folder() as folder:
        ended = subprocess.run(
            [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "runs"), "3"],
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
            env={
                **os.environ,
                "RAY_ADDRESS": "local",
                "RAY_TMPDIR": folder,
                "PYTHONPATH": str(ROOT),
            },
            cwd=tmp_path,
        )
        assert_no_process_left(folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = read_lines(tmp_path / "runs" / "mine" / "metrics.jsonl")
    assert len(lines) == 6
    assert lines[0]["loss"] == pytest.approx(3 * 4.0**2, rel=1e-12)
