"""A script whose model, optimizer and counters are made at the top of its file."""

from __future__ import annotations

import builtins
import math
import os
from pathlib import Path
from typing import Any

import torch
from epoch_scripts import EPOCHS, SIZE, first_samples
from loops import FOLDER, NUM_MICROBATCHES, NUM_STEPS, build_training, plain
from script_habits import compute, note_values, values_of
from torch import nn
from torch.utils.data import DataLoader

from pipelines.loop import Run


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    model, optimizer, scheduler, loader = build_training()
    return model, optimizer, scheduler, first_samples(loader, 96)


model, optimizer, scheduler, loader = build()
best_loss, rises = math.inf, 0


class Counter:
    def __init__(self) -> None:
        self.largest = 0.0


def train(run: Run) -> None:
    """The best loss of an epoch, and how many were worse, are those of a plain loop."""
    global model, optimizer, scheduler, loader, best_loss, rises
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    counter = Counter()
    run.keep(globals(), names=["best_loss", "rises"])
    run.keep(counter, names=["largest"])
    builtins.print = run.print
    for epoch, steps in run.epochs(EPOCHS, NUM_MICROBATCHES):
        for step in steps:
            with step:
                compute(step, model)
                scheduler.step()
            if step.committed:
                counter.largest = max(counter.largest, step.loss)
        rises += counter.largest > best_loss
        best_loss = min(best_loss, counter.largest)
        counter.largest = 0.0
        with (Path(os.environ[FOLDER]) / "printed.txt").open("a") as file:
            print(f"epoch {epoch}", end=f": {rises} rises\n", file=file)
    counts = torch.tensor([best_loss, rises], dtype=torch.float64)
    note_values(NUM_STEPS, "below", {"counts": counts, **values_of(model)})


def plain_train() -> tuple[list[float], nn.Module]:
    """The losses of all steps, and the trained model."""
    model, *others = build()
    losses = [*plain(model, *others, EPOCHS * SIZE, NUM_MICROBATCHES)]
    return losses, model
