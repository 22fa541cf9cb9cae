"""A recipe and a loop whose parameters and buffers have no dims, and their plain loop."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from loops import FOLDER, die_once
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from elastic.geometry.sample_order import sample_of
from pipelines.loop import Run
from pipelines.run.recipes import with_custom_model
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe

NUM_SAMPLES, WIDTH = 40, 6
MAX_NORM = 0.5
SETTINGS = TrainSettings(batch=12, microbatch=2, steps=40, dtype="float64", seed=3)
KILLED = (8, 16)


class Gated(nn.Module):
    """A learned gate, a frozen shift, and a running mean, none of which has a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor(0.1), requires_grad=False)
        self.register_buffer("mean", torch.tensor(0.0))

    def forward(self, hidden: Tensor) -> Tensor:
        changed = self.down(self.up(hidden).tanh()) + self.shift
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(changed.mean().to(self.mean.dtype), 0.1)
        return hidden + self.gate * (changed - self.mean)


class Scaled(nn.Module):
    """A head with the learned temperature of CLIP (Radford et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) * self.logit_scale.exp()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Gated() for _ in range(2))
        self.head = Scaled()

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.embed(points)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(NUM_SAMPLES, 4, generator=generator), torch.arange(NUM_SAMPLES) % 3
    )


def loss(model, batch):
    points, labels = batch
    return cross_entropy(model(points), labels, reduction="sum"), torch.tensor(len(labels))


def optimizer(named):
    """The groups are those of the number of dims, as scripts choose weight decay."""
    named = list(named)
    with_dims = [tensor for _, tensor in named if tensor.ndim]
    without_dims = [tensor for _, tensor in named if not tensor.ndim]
    groups = [{"params": with_dims}, {"params": without_dims, "lr": 0.05, "weight_decay": 0.2}]
    return torch.optim.AdamW(groups, lr=0.02)


def recipe() -> Recipe:
    return Recipe(
        Net,
        loss,
        optimizer,
        dataset,
        SETTINGS,
        max_grad_norm=MAX_NORM,
        plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"},
        pipeline=["embed", "layers.*", "head"],
    )


CUSTOM_SETTINGS = with_custom_model(recipe()).settings


def train_in_one_process(seed: int = SETTINGS.seed) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and the final state."""
    torch.manual_seed(seed)
    net, data = Net().double(), dataset()
    adam = optimizer([(name, p) for name, p in net.named_parameters() if p.requires_grad])
    size, losses = SETTINGS.microbatch, []
    for step in range(SETTINGS.steps):
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        after = {name: torch.zeros_like(buffer) for name, buffer in before.items()}
        total = 0.0
        for number in range(SETTINGS.num_microbatches):
            for name, buffer in net.named_buffers():
                buffer.copy_(before[name])
            first = step * SETTINGS.batch + number * size
            ids = [sample_of(seed, first + i, NUM_SAMPLES) for i in range(size)]
            rows = zip(*map(data.__getitem__, ids), strict=True)
            points, labels = (torch.stack(values) for values in rows)
            part = loss(net, (points.double(), labels))[0] / SETTINGS.batch
            part.backward()
            total += part.item()
            for name, buffer in net.named_buffers():
                after[name] += buffer / SETTINGS.num_microbatches
        for name, buffer in net.named_buffers():
            buffer.copy_(after[name])
        torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        adam.step()
        adam.zero_grad()
        losses.append(total)
    return losses, net.state_dict()


def train(run: Run) -> None:
    """A loop in which workers die twice; it looks at a gate between steps and saves the state."""
    torch.manual_seed(0)
    model = Net().double()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    loader = DataLoader(dataset(), batch_size=SETTINGS.microbatch, shuffle=True)
    model, _, loader = run.prepare(model, optimizer(trained), loader)
    gates = []
    steps = run.steps(SETTINGS.steps, SETTINGS.num_microbatches, max_grad_norm=MAX_NORM)
    for step in steps:
        with step:
            for number, (points, labels) in enumerate(step.batches()):
                if step.number == KILLED[0] and number == 1:
                    die_once(step, "forward")
                value = cross_entropy(model(points), labels)
                if step.number == KILLED[1] and number == 1:
                    value.register_hook(lambda gradient, step=step: die_once(step, "backward"))
                step.backward(value)
        if step.committed and step.number % 8 == 0:
            gates.append(model.layers[0].gate.item())
    saved = {"state": dict(model.state_dict()), "gates": gates}
    torch.save(saved, Path(os.environ[FOLDER]) / "saved.pt")
