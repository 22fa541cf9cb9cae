"""Scripts that change their model themselves between two steps, and the plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from loops import MICROBATCH, NUM_MICROBATCHES, NUM_STEPS, Net, build_training, die_once, plain
from script_habits import HELD_OUT, compute, held_out_losses, note_values
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from pipelines.loop import Run

DIES_BETWEEN = 12


class Follower(nn.Module):
    """A net, layers that follow it, and values that no optimizer changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.target = nn.Linear(8, 3).requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("rounds", torch.zeros((), dtype=torch.int64))
        self.layer = nn.Linear(3, 3)
        self.layer.register_buffer("queue", torch.randn(2, MICROBATCH))

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.net(points) * self.scale + self.target(points) / (1 + self.rounds)
        return self.layer(hidden) + self.layer.queue.mean()


def build() -> tuple[Follower, torch.optim.Optimizer, DataLoader[Any]]:
    *_, loader = build_training()
    torch.manual_seed(7)
    model = Follower().double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, SGD(trained, lr=0.2, momentum=0.9), loader


def change(model: Follower, trained: list[nn.Parameter], number: int) -> None:
    """What people do after `optimizer.step()`; `trained` were taken out of the model before."""
    for parameter in trained:
        parameter.data.clamp_(-0.5, 0.5)
    with torch.no_grad():
        for own, other in zip(model.target.parameters(), model.net.head.parameters(), strict=True):
            own.mul_(0.9).add_(other[:, :1] if other.ndim > 1 else other, alpha=0.1)
    model.scale = model.scale * 0.97
    model.rounds += 1
    model.layer.queue.data = model.layer.queue.roll(1, 1) * (1 + 0.01 * number)


def changes(run: Run) -> None:
    """Workers die in two bodies, and one between two steps, before it has changed its model."""
    model, optimizer, loader = build()
    trained = optimizer.param_groups[0]["params"]
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    run.evaluation(HELD_OUT, held_out_losses)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
        if step.number == DIES_BETWEEN:
            die_once(step, "between")
        change(model, trained, step.number)
        if step.committed and step.number % 4 == 0:
            note_values(step.number, "held", {"loss": torch.tensor(run.evaluate()["loss"])})
    note_values(NUM_STEPS, "final", model.state_dict())


def plain_changes() -> Iterator[tuple[float, float, dict[str, Tensor]]]:
    """The loss of each step, the held-out loss behind it and the values then."""
    model, optimizer, loader = build()
    trained = optimizer.param_groups[0]["params"]
    losses = plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES)
    batch = next(iter(DataLoader(HELD_OUT, batch_size=len(HELD_OUT))))
    for number, loss in enumerate(losses, start=1):
        change(model, trained, number)
        model.eval()
        with torch.no_grad():
            held_out = held_out_losses(model, batch).item()
        model.train()
        yield loss, held_out, {name: value.clone() for name, value in model.state_dict().items()}


def changes_in_front(run: Run) -> None:
    model, *_ = run.prepare(*build())
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        if step.number == 3:
            model.scale.mul_(0.5)
        with step:
            compute(step, model)


def changes_in_body(run: Run) -> None:
    model, *_ = run.prepare(*build())
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            if step.number == 3:
                model.scale.mul_(0.5)
            compute(step, model)


def changes_behind_passes(run: Run) -> None:
    model, *_ = run.prepare(*build())
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
            model.layer.queue = model.layer.queue * 0.5


def changes_on_one_worker(run: Run) -> None:
    model, *_ = run.prepare(*build())
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
        if step.committed and step.is_first_worker:
            model.scale.mul_(0.5)


def replaces_parameter(run: Run) -> None:
    model, *_ = run.prepare(*build())
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
        model.layer.weight = nn.Parameter(torch.zeros(3, 3).double())


class Momentum(Follower):
    """Its forward pass changes its own parameters, as in MoCo."""

    def forward(self, points: Tensor) -> Tensor:
        self.target.weight.data = self.target.weight.data * 0.9
        return super().forward(points)


def changes_in_forward(run: Run) -> None:
    *_, loader = build()
    model = Momentum().double()
    trained = [*model.net.parameters(), *model.layer.parameters()]
    model, *_ = run.prepare(model, SGD(trained, lr=0.1), loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
