"""Scripts that keep their own loop over the loader, and the plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from epoch_scripts import EPOCHS, SIZE, first_samples
from loops import NUM_MICROBATCHES, NUM_STEPS, build_wide, die_once, plain
from script_habits import note_values
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from pipelines.loop import Run

GAMMA, MAX_NORM = 0.97, 12.0
KILLED = (1, SIZE + 1, 3 * SIZE)
"""A worker dies in the forward pass, in the backward pass, and behind the last step of an epoch."""


class Normalized(nn.Module):
    """Layers whose statistics and draws are those of each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.second(self.first(points)))


def build_normalized() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    *_, loader = build()
    torch.manual_seed(7)
    model = Normalized().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def normalized(run: Run) -> None:
    model, optimizer, loader = build_normalized()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.range(EPOCHS, microbatches=NUM_MICROBATCHES):
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            if run.step.number in (8, 16):
                die_once(run.step, f"step {run.step.number}")
            optimizer.step()
    note_values(NUM_STEPS, "below", model.state_dict())


def plain_normalized() -> Iterator[tuple[float, nn.Module]]:
    *_, parts = build_wide()
    model, optimizer, _ = build_normalized()
    loader = first_samples(parts, 96)
    for loss in plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES):
        yield loss, model


def build() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model, optimizer, parts = build_wide()
    data = first_samples(parts, 96).dataset
    return model, optimizer, DataLoader(data, NUM_MICROBATCHES * parts.batch_size, shuffle=True)


def by_loader(run: Run) -> None:
    """The loop's lines are those of a plain script."""
    model, optimizer, loader = build()
    scheduler = StepLR(optimizer, 1, gamma=GAMMA)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    for epoch in run.range(1, EPOCHS + 1, microbatches=NUM_MICROBATCHES):
        model.train()
        total, numbers = 0.0, []
        for number, (points, labels) in enumerate(loader):
            optimizer.zero_grad()
            if run.step.number == KILLED[0]:
                die_once(run.step, "forward")
            loss = nn.functional.cross_entropy(model(points), labels)
            if run.step.number == KILLED[1]:
                loss.register_hook(lambda gradient: die_once(run.step, "backward"))
            loss.backward()
            optimizer.step()
            scheduler.step()
            if run.step.number == KILLED[2]:
                die_once(run.step, "behind")
            total += loss.item()
            numbers.append(number)
        means = {"mean": torch.tensor(total / len(loader)), "numbers": torch.tensor(numbers)}
        note_values(epoch, "epoch", means)


def plain_by_loader() -> Iterator[float]:
    *_, parts = build_wide()
    model, optimizer, _ = build()
    scheduler = StepLR(optimizer, 1, gamma=GAMMA)
    yield from plain(
        model, optimizer, scheduler, first_samples(parts, 96), NUM_STEPS, NUM_MICROBATCHES
    )


def whole_batches(run: Run) -> None:
    """One worker computes a step, whose batch must have its declared size."""
    model, optimizer, loader = run.prepare(*build())
    weights = torch.linspace(0, 1, loader.batch_size)
    for _ in run.range(1, microbatches=1):
        for points, labels in loader:
            losses = nn.functional.cross_entropy(model(points), labels, reduction="none")
            (weights * losses).mean().backward()
            optimizer.step()


def sums(run: Run) -> None:
    """The loss is the sum over its samples, and the gradients are clipped; the loop is a function
    of its own."""
    model, optimizer, loader = build_small_rate()
    model, optimizer, loader = run.prepare(model, optimizer, loader)

    def train_epoch() -> None:
        for points, labels in loader:
            optimizer.zero_grad()
            loss = sum_of_losses(model(points), labels)
            loss.backward()
            if run.step.number in (8, 16):
                die_once(run.step, f"step {run.step.number}")
            norm = clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            norms.append(float(norm))

    norms: list[float] = []
    for _ in run.range(EPOCHS, microbatches=NUM_MICROBATCHES, reduction="sum"):
        train_epoch()
    note_values(NUM_STEPS, "norms", {"norms": torch.tensor(norms)})


def plain_sums(norms: list[float]) -> Iterator[float]:
    *_, parts = build_wide()
    model, optimizer, _ = build_small_rate()
    loader = first_samples(parts, 96)
    optimizer.register_step_pre_hook(
        lambda *_: norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
    )
    yield from plain(
        model,
        optimizer,
        None,
        loader,
        NUM_STEPS,
        NUM_MICROBATCHES,
        lambda output, labels: NUM_MICROBATCHES * sum_of_losses(output, labels),
    )


def build_small_rate() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model, optimizer, loader = build()
    optimizer.param_groups[0]["lr"] = 0.004
    return model, optimizer, loader


def sum_of_losses(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels, reduction="sum")
