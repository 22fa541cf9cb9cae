"""Habits of foreign training scripts, each as a custom training loop and as the plain loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from loops import FOLDER, NUM_MICROBATCHES, NUM_STEPS, build_training, die_once, plain
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import TensorDataset

from pipelines.loop import Run

EVERY = 6
"""Every so many steps a script uses its whole model."""
PROBE = torch.linspace(-1, 1, 24).view(3, 8).double()

HELD_OUT = TensorDataset(
    torch.randn(12, 8, generator=torch.Generator().manual_seed(1)).double(), torch.arange(12) % 3
)


def compute(step: Any, model: nn.Module) -> Tensor:
    """The body of a step; one worker dies in each of two steps."""
    loss = torch.empty(())
    for number, (points, labels) in enumerate(step.batches()):
        if step.number in (8, 16) and number == 1:
            die_once(step, f"step {step.number}")
        loss = nn.functional.cross_entropy(model(points), labels)
        loss.backward()
    return loss


def rates_by_hand(run: Run) -> None:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        before_step(optimizer.param_groups, step.number)
        with step:
            compute(step, model)
            optimizer.step()
            optimizer.param_groups[0]["weight_decay"] *= 1.1
        if step.committed:
            after_step(optimizer.param_groups, step.number)


def plain_rates_by_hand() -> Iterator[float]:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    losses = plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES)
    for number in range(1, NUM_STEPS + 1):
        before_step(optimizer.param_groups, number)
        yield next(losses)
        optimizer.param_groups[0]["weight_decay"] *= 1.1
        after_step(optimizer.param_groups, number)


def before_step(groups: list[dict[str, Any]], number: int) -> None:
    groups[0]["lr"] = 0.1 / (1 + number)


def after_step(groups: list[dict[str, Any]], number: int) -> None:
    groups[1]["lr"] *= 0.95
    groups[1]["momentum"] = 0.5 + 0.4 * (number % 2)


def one_cycle_of(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A schedule that also changes the momentum."""
    return OneCycleLR(optimizer, max_lr=[0.2, 0.4], total_steps=NUM_STEPS + 1)


def one_cycle(run: Run) -> None:
    """The scheduler is stepped within the body, as where a script has `optimizer.step()`."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    scheduler = one_cycle_of(optimizer)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
            optimizer.step()
            scheduler.step()


def plain_one_cycle() -> Iterator[float]:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    yield from plain(model, optimizer, one_cycle_of(optimizer), loader, NUM_STEPS, NUM_MICROBATCHES)


def plateau_of(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)


def held_out_losses(model: nn.Module, batch: Any) -> Tensor:
    points, labels = batch
    return nn.functional.cross_entropy(model(points), labels)


def plateau(run: Run) -> None:
    """Rates that depend on a held-out loss."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    scheduler = plateau_of(optimizer)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    run.evaluation(HELD_OUT, held_out_losses)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
        if step.committed and step.number % 2 == 0:
            scheduler.step(run.evaluate()["loss"])


def plain_plateau() -> Iterator[float]:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    scheduler = plateau_of(optimizer)
    losses = plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES)
    for number, loss in enumerate(losses, start=1):
        yield loss
        if number % 2 == 0:
            model.eval()
            with torch.no_grad():
                scheduler.step(float(held_out_losses(model, HELD_OUT[:])))
            model.train()


def whole_model(run: Run) -> None:
    """A script that saves, copies and calls its model in the loop, some on the first worker only.

    It keeps the raw module under another name.
    """
    raw, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(raw, optimizer, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        if step.number % EVERY == 1 and step.number > 1:
            note_values(step.number - 1, "before", values_of(raw))
        with step:
            compute(step, model)
        if step.committed and step.number % EVERY == 0:
            if step.is_first_worker:
                note_values(step.number, "first", values_of(model))
            note_values(step.number, "copy", values_of(deepcopy(model)))


def plain_whole_model() -> Iterator[dict[str, Tensor]]:
    """The values of each step."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    for _ in plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES):
        yield deepcopy(values_of(model))


def plain_whole_model_losses() -> Iterator[float]:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    yield from plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES)


@torch.no_grad()
def values_of(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model, and its output in evaluation."""
    model.eval()
    values = {**model.state_dict(), "output": model(PROBE), "weight": model.head.weight}
    model.train()
    return values


def note_values(number: int, moment: str, values: dict[str, Tensor]) -> None:
    if FOLDER in os.environ:
        name = Path(os.environ[FOLDER]) / f"{moment}-{number}-{os.getpid()}.pt"
        torch.save(values, name)


def die_between_steps(run: Run) -> None:
    """Workers die where others gather the model, before all change a rate."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for points, labels in step.batches():
                step.backward(nn.functional.cross_entropy(model(points), labels))
        if step.committed:
            if step.number in (8, 16):
                die_once(step, f"step {step.number}")
            if step.number % 4 == 0:
                model.state_dict()
            after_step(optimizer.param_groups, step.number)


def plain_die_between_steps() -> Iterator[float]:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    losses = plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES)
    for number, loss in enumerate(losses, start=1):
        yield loss
        after_step(optimizer.param_groups, number)


def slow_between_steps(run: Run) -> None:
    """Workers die where others run slow code between two steps, behind a change of the rates."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    scheduler = one_cycle_of(optimizer)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for points, labels in step.batches():
                step.backward(nn.functional.cross_entropy(model(points), labels))
            optimizer.step()
            scheduler.step()
        if step.committed and step.number in (8, 16):
            die_once(step, f"step {step.number}")
            time.sleep(3)


def first_only(run: Run) -> None:
    """A script that asks only once, and in the body, whether it is the first worker."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    is_first = None
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            is_first = step.is_first_worker if is_first is None else is_first
            compute(step, model)
        if is_first and step.committed and step.number % EVERY == 0:
            note_values(step.number, "first", values_of(model))


def layer_by_layer(run: Run) -> None:
    """A body that iterates over the layers of a container, and reads one by its index."""
    raw, optimizer, loader = build_container()
    model, optimizer, loader = run.prepare(raw, optimizer, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for number, (points, labels) in enumerate(step.batches()):
                if step.number in (8, 16) and number == 1:
                    die_once(step, f"step {step.number}")
                hidden = points
                for layer in model:
                    hidden = layer(hidden)
                step.backward(nn.functional.cross_entropy(hidden, labels))
        if step.committed and step.number % EVERY == 0:
            note_values(step.number, "layer", {"weight": raw[2].weight.detach().clone()})


def second_order(run: Run) -> None:
    """A body with the penalty of a gradient, as that of WGAN-GP."""
    raw, optimizer, loader = build_container()
    model, optimizer, loader = run.prepare(raw, optimizer, loader)
    for step in run.steps(4, microbatches=NUM_MICROBATCHES):
        with step:
            for points, labels in step.batches():
                points.requires_grad_()
                loss = nn.functional.cross_entropy(model(points), labels)
                [gradient] = torch.autograd.grad(loss, points, create_graph=True)
                step.backward(loss + gradient.norm())


def build_container() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    *_, loader = build_training(is_scheduled=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader


def plain_layer_by_layer() -> Iterator[tuple[float, Tensor]]:
    model, optimizer, loader = build_container()
    for loss in plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES):
        yield loss, model[2].weight.detach().clone()


def reports(run: Run) -> None:
    """A script that reports of each microbatch, of each worker, and what it has evaluated."""
    raw, optimizer, loader = build_container()
    model, optimizer, loader = run.prepare(raw, optimizer, loader)
    run.evaluation(HELD_OUT, held_out_losses)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for number, (points, labels) in enumerate(step.batches()):
                if step.number in (8, 16) and number == 1:
                    die_once(step, f"step {step.number}")
                logits = model(points)
                step.backward(nn.functional.cross_entropy(logits, labels))
                is_right = logits.argmax(1) == labels
                step.report(accuracy=is_right.double().mean())
                step.report(share=(is_right[:2].sum(), 2))
            step.report(number=step.number)
        if step.committed and step.number % EVERY == 0:
            held_out = run.evaluate()["loss"]
            if step.is_first_worker:
                step.report(held_out=held_out)
        if step.committed and (step.number % 2 or step.is_first_worker):
            reported = step.reported.items()
            note_values(step.number, "reported", {name: torch.tensor(v) for name, v in reported})


def plain_reports() -> Iterator[dict[str, float]]:
    model, optimizer, loader = build_container()
    right: list[Tensor] = []

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        right.append((logits.argmax(1) == labels).double())
        return nn.functional.cross_entropy(logits, labels)

    losses = plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES, criterion)
    for number, _ in enumerate(losses, start=1):
        shares = torch.stack([each[:2].mean() for each in right])
        numbers = {"accuracy": torch.cat(right).mean().item(), "share": shares.mean().item()}
        if number % EVERY == 0:
            with torch.no_grad():
                numbers["held_out"] = held_out_losses(model, HELD_OUT[:]).item()
        yield {**numbers, "number": float(number)}
        right.clear()


PLAIN: dict[str, Callable[[], Iterator[float]]] = {
    "rates_by_hand": plain_rates_by_hand,
    "one_cycle": plain_one_cycle,
    "plateau": plain_plateau,
    "die_between_steps": plain_die_between_steps,
    "slow_between_steps": plain_one_cycle,
}


OVERFLOW_STEP, GROWTH_INTERVAL = 13, 5


def scaler_of() -> GradScaler:
    return GradScaler("cpu", init_scale=1024.0, growth_interval=GROWTH_INTERVAL)


def loss_scaler(run: Run) -> None:
    """A scaled loss, whose gradient overflows in one step."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    scaler = scaler_of()
    model, optimizer, scaler, loader = run.prepare(model, optimizer, scaler, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for number, (points, labels) in enumerate(step.batches()):
                if step.number in (8, 16) and number == 1:
                    die_once(step, f"step {step.number}")
                loss = nn.functional.cross_entropy(model(points), labels)
                if step.number == OVERFLOW_STEP:
                    loss.register_hook(lambda gradient: gradient * float("inf"))
                step.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if step.committed and step.is_first_worker:
            note_values(step.number, "scale", {"scale": torch.tensor(scaler.get_scale())})


def plain_loss_scaler() -> Iterator[float]:
    """The losses; the step whose gradients overflow has no effect."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    losses = plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES)
    for number in range(1, NUM_STEPS + 1):
        before = deepcopy((model.state_dict(), optimizer.state_dict()))
        yield next(losses)
        if number == OVERFLOW_STEP:
            model.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])


def plain_scales() -> Iterator[float]:
    """The scales after each step, by the rule of `GradScaler.update`."""
    scale, num_good = 1024.0, 0
    for number in range(1, NUM_STEPS + 1):
        num_good = 0 if number == OVERFLOW_STEP else num_good + 1
        if number == OVERFLOW_STEP:
            scale *= 0.5
        elif num_good == GROWTH_INTERVAL:
            scale, num_good = scale * 2, 0
        yield scale


def autocast(run: Run) -> None:
    model, optimizer, _, loader = build_training(is_scheduled=False, dtype=torch.float32)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step, torch.autocast("cpu", dtype=torch.bfloat16):
            compute(step, model)


def plain_autocast() -> Iterator[float]:
    model, optimizer, _, loader = build_training(is_scheduled=False, dtype=torch.float32)
    losses = plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES)
    for _ in range(NUM_STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next(losses)
        yield loss
