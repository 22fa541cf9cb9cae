"""Scripts that leave their loop early, and run on below it, while workers die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from loops import FOLDER, NUM_MICROBATCHES, NUM_STEPS, build_training, plain
from script_habits import compute, note_values, values_of
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pipelines.loop import Run

STOP_STEP = 10


def break_early(run: Run) -> None:
    """A loop that is left by `break` behind another iterator, and code below it."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in wrapped(run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES)):
        with step:
            compute(step, model)
        if step.committed and step.number == STOP_STEP:
            break
    note_values(STOP_STEP, "below", values_of(model))


def wrapped(steps: Iterator[Any]) -> Iterator[Any]:
    """What tqdm does."""
    for step in steps:  # noqa: UP028
        yield step


def stop_early(run: Run) -> None:
    """A loop that ends because the script has stopped the run, and slow code below it."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
        if step.committed and step.number == STOP_STEP:
            run.stop()
    time.sleep(3)
    note_values(STOP_STEP, "below", values_of(model))


def break_before_commit(run: Run) -> None:
    """A `break` that does not ask whether its step has committed; a worker dies in that step."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
        if step.number == 8:
            break
    note_values(8, "below", values_of(model))


def held_iterator(run: Run) -> None:
    """A loop whose iterator outlives it, as a progress bar does."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    steps = run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES)
    for step in steps:
        with step:
            compute(step, model)
        if step.committed and step.number == STOP_STEP:
            break
    note_values(STOP_STEP, "below", values_of(model))
    del steps


def train_all(run: Run) -> nn.Module:
    """A loop over all steps; returns the model."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(STOP_STEP, microbatches=NUM_MICROBATCHES):
        with step:
            for points, labels in step.batches():
                step.backward(nn.functional.cross_entropy(model(points), labels))
    return model


def die_below_loop(run: Run) -> None:
    """The first worker dies in the code below the loop."""
    model = train_all(run)
    if mark("below"):
        os.kill(os.getpid(), signal.SIGKILL)
    note_values(STOP_STEP, "below", values_of(model))


def other_dies_below_loop(run: Run) -> None:
    """Another worker than the first dies while the first runs long code below the loop."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    is_first = True
    for step in run.steps(STOP_STEP, microbatches=NUM_MICROBATCHES):
        is_first = step.is_first_worker
        with step:
            for points, labels in step.batches():
                step.backward(nn.functional.cross_entropy(model(points), labels))
        if step.committed and step.number == STOP_STEP and not is_first and mark("other"):
            threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    time.sleep(5)
    note_values(STOP_STEP, "below", values_of(model))


def leave_on_own_loss(run: Run) -> None:
    """A `break` that depends on one worker's microbatches."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for points, labels in step.batches():
                step.backward(nn.functional.cross_entropy(model(points), labels))
        if step.committed and step.number == STOP_STEP and step.is_first_worker:
            break


def mark(name: str) -> bool:
    """Whether this is the first process to come here; not in the plan, which has no folder."""
    if FOLDER not in os.environ:
        return False
    try:
        (Path(os.environ[FOLDER]) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def raise_between_steps(run: Run) -> None:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in wrapped(run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES)):
        with step:
            compute(step, model)
        if step.committed and step.number == STOP_STEP:
            raise ValueError("a mistake between two steps")


def fails_behind_step(run: Run) -> None:
    """The script fails the first time, behind a step in whose block it has stepped its scheduler,
    and after a change of what it keeps."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    scheduler = rate_of(optimizer)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    kept = {"rounds": torch.zeros(())}
    run.keep(kept)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for points, labels in step.batches():
                step.backward(nn.functional.cross_entropy(model(points), labels))
            scheduler.step()
        kept["rounds"] += 1
        if step.committed and step.number == STOP_STEP and mark(f"failed {os.getpid()}"):
            raise OSError("no space left")
    note_values(NUM_STEPS, "below", kept)


def plain_behind_step() -> Iterator[float]:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    kept = {"rounds": torch.zeros(())}
    losses = plain(model, optimizer, rate_of(optimizer), loader, NUM_STEPS, NUM_MICROBATCHES)
    for loss in losses:
        kept["rounds"] += 1
        yield loss


def rate_of(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: (step + 1) / 12)


def fails_below_loop(run: Run) -> None:
    """The code below the loop fails the first time."""
    model = train_all(run)
    if mark("failed"):
        raise OSError("no space left")
    note_values(STOP_STEP, "below", values_of(model))
