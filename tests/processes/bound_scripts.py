"""Scripts that change what they have given to the run, or look at their model from outside, and
their plain loops."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from loops import FOLDER, MICROBATCH, NUM_MICROBATCHES, NUM_STEPS, Net, die_once, plain
from script_habits import HELD_OUT, compute, held_out_losses
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pipelines.loop import Run


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples whose augmentation the script makes stronger."""

    def __init__(self) -> None:
        points = torch.randn(100, 8, generator=torch.Generator().manual_seed(4)).double()
        self.tensors = points, torch.arange(100) % 3
        self.transform = SimpleNamespace(strength=0.0)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        points, labels = self.tensors
        return points[index] + self.transform.strength * torch.randn(8).double(), labels[index]


class Script:
    """A model and its data, as a script and its plain loop make them."""

    def __init__(self, data: Any = None) -> None:
        torch.manual_seed(3)
        self.model: Any = Net().double()
        self.optimizer: Any = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.data = data or TensorDataset(*Augmented().tensors)
        self.loader: Any = DataLoader(self.data, batch_size=MICROBATCH, shuffle=True)

    def prepare(self, run: Run) -> Iterator[Any]:
        """The steps of the run."""
        self.model, self.optimizer, self.loader = run.prepare(
            self.model, self.optimizer, self.loader
        )
        return run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES)

    def losses(self, criterion: Any = nn.functional.cross_entropy) -> Iterator[float]:
        """Those of the plain loop."""
        counts = NUM_STEPS, NUM_MICROBATCHES
        return plain(self.model, self.optimizer, None, self.loader, *counts, criterion)


def numbered(losses: Iterator[float], before: Callable[[int], object]) -> Iterator[float]:
    """The losses; `before` is called in front of each step."""
    for number in range(1, NUM_STEPS + 1):
        before(number)
        yield next(losses)


def averages_of(model: nn.Module) -> AveragedModel:
    averages = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    return averages.eval()


def evaluates_averages(run: Run) -> None:
    """The held-out loss is that of averaged weights, and decides the learning rate. A worker dies
    before it is evaluated, where the others have updated the averages."""
    script = Script()
    averages = run.keep(averages_of(script.model))
    run.evaluation(HELD_OUT, lambda model, batch: held_out_losses(averages, batch))
    for step in script.prepare(run):
        with step:
            for number, (points, labels) in enumerate(step.batches()):
                if step.number == 8 and number == 1:
                    die_once(step, "body")
                step.backward(nn.functional.cross_entropy(script.model(points), labels))
        if step.committed:
            averages.update_parameters(script.model)
            if step.number == 16:
                die_once(step, "between")
            script.optimizer.param_groups[0]["lr"] = 0.1 * run.evaluate()["loss"]


def plain_evaluates_averages() -> Iterator[float]:
    script = Script()
    averages = averages_of(script.model)
    for loss in script.losses():
        yield loss
        averages.update_parameters(script.model)
        with torch.no_grad():
            held_out = float(held_out_losses(averages, HELD_OUT[:]))
        script.optimizer.param_groups[0]["lr"] = 0.1 * held_out


def augments(run: Run) -> None:
    script = Script(Augmented())
    for step in script.prepare(run):
        script.data.transform.strength = step.number / 40
        with step:
            compute(step, script.model)


def plain_augments() -> Iterator[float]:
    script = Script(Augmented())

    def strengthen(number: int) -> None:
        script.data.transform.strength = number / 40

    yield from numbered(script.losses(), strengthen)


def fills_a_buffer(run: Run) -> None:
    """Samples that the script replaces, as a replay buffer; it is part of the run's state."""
    script = Script()
    run.keep(script.data.tensors[0])
    for step in script.prepare(run):
        with step:
            compute(step, script.model)
        if step.committed:
            fill(script.data.tensors[0], step.number)


def fill(points: Tensor, number: int) -> None:
    points[number % 7 :: 7] *= -0.9


def plain_fills_a_buffer() -> Iterator[float]:
    script = Script()
    for number, loss in enumerate(script.losses(), start=1):
        yield loss
        fill(script.data.tensors[0], number)


class Tap:
    """Notes the outputs of a layer."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def hook(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs.append(output)


class Masked(nn.Module):
    """A net that reads a configuration of the script at each pass."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.net = Net().double()
        self.before = self.scaled

    def scaled(self, points: Tensor) -> Tensor:
        return points * self.config.ratio

    def forward(self, points: Tensor) -> Tensor:
        return self.net(self.before(points))


class Observed(Script):
    """The script's configuration and hooks, and a loss of what these have noted."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(ratio=1.0)
        self.model = Masked(self.config)
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.tap, self.noted = Tap(), {}
        first, second = self.model.net.layers
        first.register_forward_hook(lambda layer, _, output: self.noted.update(first=output))
        second.register_forward_hook(self.tap.hook)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        second = self.tap.outputs[-1]
        self.tap.outputs.clear()
        others = self.noted["first"].square().mean() + second.abs().mean()
        return nn.functional.cross_entropy(logits, labels) + 0.3 * others

    def schedule(self, number: int) -> None:
        self.config.ratio = 1 - 1 / (1 + number)


def observes(run: Run) -> None:
    script = Observed()
    for step in script.prepare(run):
        script.schedule(step.number)
        with step:
            for number, (points, labels) in enumerate(step.batches()):
                if step.number in (8, 16) and number == 1:
                    die_once(step, f"step {step.number}")
                step.backward(script.loss(script.model(points), labels))


def plain_observes() -> Iterator[float]:
    script = Observed()
    yield from numbered(script.losses(script.loss), script.schedule)


def trains_in_the_block(run: Run) -> None:
    """The model is in evaluation mode before the loop, as a loaded one is."""
    script = Script()
    script.model.eval()
    for step in script.prepare(run):
        with step:
            script.model.train()
            if step.number > 10:
                script.model.layers[0].eval()
            compute(step, script.model)


def plain_trains_in_the_block() -> Iterator[float]:
    script = Script()

    def set_modes(number: int) -> None:
        script.model.train()
        if number > 10:
            script.model.layers[0].eval()

    yield from numbered(script.losses(), set_modes)


def freezes_later(run: Run) -> None:
    """Modes and numbers of parts that the script sets once: a worker that joins has them."""
    script = Script()
    freeze(script.model, 0)
    for step in script.prepare(run):
        with step:
            compute(step, script.model)
        if step.committed:
            freeze(script.model, step.number)


def freeze(model: Any, number: int) -> None:
    first, second = (part for part in model.modules() if isinstance(part, nn.BatchNorm1d))
    if number in (0, 20):
        first.eval()
    elif number in (4, 18):
        model.train()
    elif number == 9:
        second.eval()
    elif number in (3, 11):
        model.dropout.p = 1 / number


def plain_freezes_later() -> Iterator[float]:
    script = Script()
    freeze(script.model, 0)
    for number, loss in enumerate(script.losses(), start=1):
        yield loss
        freeze(script.model, number)


PLAIN: dict[str, Callable[[], Iterator[float]]] = {
    "evaluates_averages": plain_evaluates_averages,
    "augments": plain_augments,
    "fills_a_buffer": plain_fills_a_buffer,
    "observes": plain_observes,
    "trains_in_the_block": plain_trains_in_the_block,
    "freezes_later": plain_freezes_later,
}


def grows(run: Run) -> None:
    """A dataset that has more samples than before the loop."""
    script = Script()
    for step in script.prepare(run):
        with step:
            compute(step, script.model)
        if FOLDER in os.environ:
            script.data.tensors = tuple(torch.cat([each, each]) for each in script.data.tensors)
