"""A script that counts in each way that scripts have, and kills one worker once, at any moment."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from loops import FOLDER, MICROBATCH, NUM_MICROBATCHES, build_training
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipelines.loop import Run, Step

EPOCHS, SIZE = 3, 4
MOMENT, IS_FIRST = "LOOP_DEATH", "LOOP_DEATH_OF_FIRST"
"""The moment at which a worker dies, and whether it is the first one."""
PRINTED = "printed"
ACCURACY = "accuracy"
"""The beginning of lines with what all workers report, which lack a worker that dies first."""
IN_BODY, BEHIND_BODY, BETWEEN_EPOCHS, AT_THE_TOP = "in body", "behind body", "between", "at the top"
num_batches = 0


class Average:
    """As the meters of training functions."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1


class Trainer:
    def __init__(self) -> None:
        self.num_steps, self.best_epoch = 0, -1
        self.losses: list[float] = []


def die(run: Run, moment: str, number: int) -> None:
    """Kill one worker, the first or another, where the environment says so."""
    is_wanted = os.environ.get(MOMENT) == f"{moment} {number}"
    if not is_wanted or run.is_first_worker != bool(os.environ.get(IS_FIRST)):
        return
    try:
        (Path(os.environ[FOLDER]) / "died").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def write(run: Run, text: str) -> None:
    """Print to a file, once."""
    if folder := os.environ.get(FOLDER):
        with open(Path(folder) / PRINTED, "a") as file:
            run.print(text, file=file)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    points, labels = batch
    return nn.functional.cross_entropy(model(points), labels)


def train_epoch(
    run: Run, steps: Iterable[Step], model: nn.Module, optimizer: Any, trainer: Trainer
) -> str:
    global num_batches
    accuracy, total = Average(), 0.0
    sum_of_losses, seen = torch.zeros((), dtype=torch.float64), []
    for index, step in enumerate(steps):
        with step:
            for number, (points, labels) in enumerate(step.batches()):
                if number == 1:
                    die(run, IN_BODY, step.number)
                logits = model(points)
                step.report(accuracy=(logits.argmax(1) == labels).double().mean())
                step.backward(nn.functional.cross_entropy(logits, labels))
            optimizer.step()
            num_batches += 1
        die(run, BEHIND_BODY, step.number)
        total += step.loss
        sum_of_losses += step.loss
        accuracy.update(step.reported["accuracy"])
        seen.append(index)
        trainer.num_steps += 1
        trainer.losses.append(step.loss)
        write(run, f"step {step.number} {index} {step.loss:.9f}")
        write(run, f"{ACCURACY} {step.number} {accuracy.sum:.9f}")
    return f"{total:.9f} {sum_of_losses:.9f} {accuracy.count} {seen}"


def main(run: Run) -> None:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    samples = loader.dataset.tensors
    data = TensorDataset(*(values[: SIZE * NUM_MICROBATCHES * MICROBATCH] for values in samples))
    whole = DataLoader(data, NUM_MICROBATCHES * MICROBATCH, shuffle=True)
    model, optimizer, scheduler, _ = run.prepare(model, optimizer, scheduler, whole)
    run.evaluation(TensorDataset(*(values[-8:] for values in samples)), loss_of)
    trainer, best = Trainer(), {"loss": math.inf}
    run.keep(best)
    for number, (epoch, steps) in enumerate(
        run.epochs(EPOCHS, NUM_MICROBATCHES, split_batches=True)
    ):
        model.train()
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * (epoch + 1)
        die(run, AT_THE_TOP, epoch)
        means = train_epoch(run, steps, model, optimizer, trainer)
        die(run, BETWEEN_EPOCHS, epoch)
        scheduler.step()
        model.eval()
        held_out = run.evaluate()["loss"]
        if held_out < best["loss"]:
            best["loss"], trainer.best_epoch = held_out, epoch
        write(run, f"epoch {epoch} {number}: {means}; {held_out:.9f} {trainer.best_epoch}")
        write(run, f"so far: {trainer.num_steps} {num_batches} {sum(trainer.losses):.9f}")
    write(run, f"end: {best['loss']:.9f} {trainer.num_steps} {len(trainer.losses)}")
