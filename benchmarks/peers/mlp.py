"""The model, batch and optimizer of the `mlp` recipe for the peers, and their step log."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

DIMS = (512, 1024, 1024, 512)
BATCH = 64
CHECKPOINT_EVERY = 10
MAX_GRAD_NORM = 1.0
"""Gradients are clipped to this norm, as the recipe does."""
PID = os.getpid()
torch.set_flush_denormal(True)  # as workers of ours do: moments that fade make steps twice as long


def make_model() -> nn.Sequential:
    """The same 2.1 M parameters on every rank."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for first, second in pairwise(DIMS):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)


def loss_of(model: nn.Module, step: int, data_rank: int, num_data_ranks: int) -> Tensor:
    """The loss of this rank's part of a step's batch."""
    generator = torch.Generator().manual_seed(step * 1000 + data_rank)
    inputs = torch.randn(BATCH // num_data_ranks, DIMS[0], generator=generator)
    return functional.mse_loss(model(inputs), inputs.sin())


class StepLog:
    """Reports this process's pid and committed steps to the benchmark, through files."""

    def __init__(self, folder: Path, world_rank: int) -> None:
        partial = folder / f".pid-{world_rank}"
        partial.write_text(str(PID))
        partial.replace(folder / f"pid-{world_rank}")
        self._file = (folder / "steps.jsonl").open("a")

    def commit(
        self, step: int, world_size: int, attempt: int = PID, loss: float | None = None
    ) -> None:
        """Report a committed step, from one rank. `attempt` is any number that changes with a
        recovery: this process's id, if a recovery restarts processes."""
        line = {"time": time.time(), "step": step, "attempt": attempt, "world_size": world_size}
        line["loss"] = loss
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
