"""Scripts with state of their own: averaged weights, running means, counters; and their plain
loops."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from loops import FOLDER, NUM_MICROBATCHES, NUM_STEPS, build_training, die_once, plain
from script_habits import compute, note_values
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipelines.loop import Run


class Followed:
    """What a plain script has around its loop; the learning rate follows it."""

    def __init__(self, model: nn.Module) -> None:
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.shadow = {name: value.clone() for name, value in model.named_parameters()}
        self.mean = torch.ones(2, dtype=torch.float64)
        self.best: dict[str, Any] = {"loss": 9.0, "rounds": 0, "is_good": False}

    def follow(self, model: nn.Module, loss: float, group: dict[str, Any]) -> None:
        """After each step."""
        self.averaged.update_parameters(model)
        for name, value in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * value.detach()
        self.mean.lerp_(torch.full((2,), loss, dtype=torch.float64), 0.3)
        self.best["is_good"] = loss < self.best["loss"]
        self.best["loss"] = min(self.best["loss"], loss)
        self.best["rounds"] += not self.best["is_good"]
        distance = sum((self.shadow[name] - value).norm() for name, value in self.weights())
        group["lr"] = 0.1 * float(self.mean[0] + distance) / (1 + self.best["rounds"])

    def weights(self) -> list[tuple[str, Tensor]]:
        return [(name, value.detach()) for name, value in self.averaged.module.named_parameters()]


def follows(run: Run) -> None:
    """Workers die in a body and between two steps."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    followed = Followed(model)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    run.keep(followed.averaged, followed.shadow, followed.mean, followed.best)
    dies = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for points, labels in step.batches():
                if step.number == 8 and dies and not (dies / "body").exists():
                    followed.mean.zero_()  # undone, as this step fails
                    die_once(step, "body")
                step.backward(nn.functional.cross_entropy(model(points), labels))
        if step.committed:
            if step.number == 16:
                die_once(step, "between")
            followed.follow(model, step.loss, optimizer.param_groups[0])
    note_values(NUM_STEPS, "averaged", dict(followed.averaged.state_dict()))


def first_dies(run: Run) -> None:
    """The first worker dies twice; a variable counts the steps that its worker has seen."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    num_seen = 0
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for number, (points, labels) in enumerate(step.batches()):
                if step.number in (8, 16) and number == 1 and step.is_first_worker:
                    die_first(f"first {step.number}")
                step.backward(nn.functional.cross_entropy(model(points), labels))
        if step.committed:
            num_seen += 1
            if step.is_first_worker:
                note_values(step.number, "seen", {"steps": torch.tensor(num_seen)})
    note_values(NUM_STEPS, "below", {"steps": torch.tensor(num_seen)})


def die_first(moment: str) -> None:
    if FOLDER in os.environ and not (mark := Path(os.environ[FOLDER]) / moment).exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def sets_in_first_step(run: Run) -> None:
    """A variable that a worker which joins has not set."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        if step.number == 1:
            best = 9.0
        with step:
            compute(step, model)
        best = min(best, step.loss)


def plain_follows() -> Iterator[tuple[float, dict[str, Tensor]]]:
    """The loss of each step, and the averaged weights after it."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    followed = Followed(model)
    losses = plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES)
    for loss in losses:
        followed.follow(model, loss, optimizer.param_groups[0])
        yield loss, {name: v.clone() for name, v in followed.averaged.state_dict().items()}


def follows_its_own_loss(run: Run) -> None:
    """A script whose learning rate depends on the worker's own microbatches."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            loss = compute(step, model).item()
        optimizer.param_groups[0]["lr"] = loss


def keeps_its_own_loss(run: Run) -> None:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    mean = run.keep(torch.zeros(3))
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            loss = compute(step, model).item()
        mean += loss


def adds_later(run: Run) -> None:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    kept = run.keep({"shown": torch.zeros(3)})
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
        kept["hidden"] = torch.zeros(3)


def stops_early(run: Run) -> None:
    """The loop ends behind an update of what is kept."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    counts = run.keep({"updates": 0})
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
        if step.committed:
            counts["updates"] += 1
            if step.number in (5, 7):
                note_values(step.number, "counts", {"updates": torch.tensor(counts["updates"])})
                break
