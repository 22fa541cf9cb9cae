"""A script that draws outside of its microbatches and counts samples, and its plain loop."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from loops import FOLDER, NUM_MICROBATCHES, NUM_STEPS, build_training, die_once, plain
from script_habits import HELD_OUT, held_out_losses
from torch import Tensor
from torch.nn.functional import cross_entropy

from pipelines.loop import Run

EVERY = 4


def draw() -> list[float]:
    return [random.random(), float(np.random.beta(1, 1)), torch.rand(()).item()]


def train(run: Run) -> None:
    """The loss of a step has a factor drawn in its body; each worker notes all that it draws."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    run.evaluation(HELD_OUT, held_out_losses)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        before, num_seen = draw(), 0
        with step:
            factor, _, _ = within = draw()
            for number, (points, labels) in enumerate(step.batches()):
                if step.number in (8, 16) and number == 1:
                    die_once(step, f"step {step.number}")
                step.backward(factor * cross_entropy(model(points), labels))
                num_seen += step.num_samples
            behind = draw()
            step.report(seen=(num_seen, int(step.is_first_worker)))
        if step.committed:
            if step.number % EVERY == 0:
                run.evaluate()
            note(step.number, [before, within, behind, draw()])


def note(step: int, drawn: list[list[float]]) -> None:
    if folder := os.environ.get(FOLDER):
        (Path(folder) / f"drawn-{step}-{os.getpid()}").write_text(json.dumps(drawn))


def plain_losses(factors: Mapping[int, float]) -> Iterator[float]:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    step = 1

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        return factors[step] * cross_entropy(logits, labels)

    for loss in plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES, criterion):
        yield loss
        step += 1
