"""A foreign training script for a GPU, and its model."""

from __future__ import annotations

from typing import Any

import torch
from loops import MICROBATCH, NUM_MICROBATCHES, NUM_STEPS, die_once
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from pipelines.loop import Run


def build(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    data = TensorDataset(torch.randn(100, 8).to(dtype), torch.arange(100) % 3)
    loader = DataLoader(data, batch_size=MICROBATCH, shuffle=True, pin_memory=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1), loader


def train(run: Run, dtype: torch.dtype = torch.float64) -> None:
    """Moves its model and its samples to the GPU itself, sets its rate by hand, scales its loss and
    uses its whole model between steps; two workers die."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer, loader = build(dtype)
    model.to(device)
    scaler = GradScaler(device.type, init_scale=1024.0, growth_interval=5)
    raw = model
    model, optimizer, scaler, loader = run.prepare(model, optimizer, scaler, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        optimizer.param_groups[0]["lr"] = rate_at(step.number)
        with step:
            for number, batch in enumerate(step.batches()):
                points, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
                if step.number in (8, 16) and number == 1:
                    die_once(step, f"step {step.number}")
                with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.float32):
                    loss = nn.functional.cross_entropy(model(points), labels)
                step.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
        if step.committed and step.number % 6 == 0:
            values = raw.state_dict()
            assert {value.device.type for value in values.values()} == {device.type}
            assert torch.isfinite(output_of(raw, device)).all()


def train_by_autocast(run: Run) -> None:
    train(run, torch.float32)


def rate_at(step: int) -> float:
    return 0.05 / step**0.5


@torch.no_grad()
def output_of(model: nn.Module, device: torch.device) -> Tensor:
    probe = torch.ones(2, 8, device=device, dtype=next(model.parameters()).dtype)
    return model(probe)
