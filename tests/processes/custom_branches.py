"""A recipe whose module skips one block for each sample, and its plain loop."""

from __future__ import annotations

import torch
from torch import nn

from elastic.geometry.sample_order import sample_of
from pipelines.run.recipes import with_custom_model
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe

WIDTH = 400
"""Large enough that a block's gradients do not share a bucket with others."""
NUM_SAMPLES, NUM_BLOCKS = 24, 3
SETTINGS = TrainSettings(batch=4, microbatch=1, steps=8, dtype="float64", seed=5)


class Samples:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        values = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
        return {"values": values, "skipped_block": torch.tensor(index % NUM_BLOCKS)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, values: torch.Tensor, skipped_block: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped_block:
                values = values + layer(values).tanh()
        return values


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["values"], int(batch["skipped_block"])).square().mean()


def optimizer(named):
    return torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.01)


def recipe() -> Recipe:
    return Recipe(Net, loss, optimizer, Samples, SETTINGS)


CUSTOM_SETTINGS = with_custom_model(recipe()).settings


def train_in_one_process() -> list[float]:
    torch.manual_seed(SETTINGS.seed)
    net, data, losses = Net().double(), Samples(), []
    sgd = optimizer(list(net.named_parameters()))
    for step in range(SETTINGS.steps):
        total_loss = 0.0
        for number in range(SETTINGS.batch):
            sample = data[sample_of(SETTINGS.seed, step * SETTINGS.batch + number, NUM_SAMPLES)]
            loss_value = (
                loss(net, {name: value[None] for name, value in sample.items()}) / SETTINGS.batch
            )
            loss_value.backward()
            total_loss += loss_value.item()
        sgd.step()
        sgd.zero_grad()
        losses.append(total_loss)
    return losses
