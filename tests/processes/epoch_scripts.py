"""Scripts with a loop over epochs and one over steps in it, and the plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from loops import NUM_MICROBATCHES, NUM_STEPS, build_training, die_once, plain
from script_habits import compute, note_values, values_of
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from pipelines.loop import Run
from pipelines.loop.epochs import EpochSteps

EPOCHS, SIZE = 6, 4
LEFT_AFTER, DIES_AFTER = 4, 3
FACTOR = 0.7
"""Of the learning rate from epoch to epoch."""


def build(num_samples: int = 96) -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    loader = first_samples(loader, num_samples)
    return model, optimizer, StepLR(optimizer, 1, gamma=FACTOR), loader


def first_samples(loader: DataLoader[Any], number: int) -> DataLoader[Any]:
    data = TensorDataset(*(values[:number] for values in loader.dataset.tensors))
    return DataLoader(data, batch_size=loader.batch_size, shuffle=True)


def train_epoch(steps: EpochSteps, model: nn.Module) -> float:
    """A function of its own, as scripts have it; a worker that joins is in the midst of it."""
    loss = 0.0
    for step in steps:
        with step:
            compute(step, model)
            assert not torch.distributed.is_initialized()
        if step.committed:
            loss = step.loss
            assert step.index == (step.number - 1) % SIZE
            if step.number == SIZE * DIES_AFTER:
                die_once(step, "last of an epoch")
    return loss


def by_epochs(run: Run) -> None:
    """Workers die in two bodies, and one behind the last step of an epoch."""
    model, _, scheduler, _ = run.prepare(*build())
    for epoch, steps in run.epochs(EPOCHS, NUM_MICROBATCHES):
        train_epoch(steps, model)
        scheduler.step()
        note_values(epoch, "epoch", values_of(model))
    note_values(NUM_STEPS, "below", values_of(model))
    seen = torch.distributed.is_initialized(), torch.distributed.distributed_c10d.is_initialized()
    note_values(NUM_STEPS, "groups", {"seen": torch.tensor(seen)})


def begins_epochs(run: Run) -> None:
    """Code at the top of an epoch, which does not run again with its first step. In two of these a
    worker dies, and in one within an epoch: those that join run the code then. A batch of the
    loader is a step's."""
    model, optimizer, scheduler, loader = build()
    whole = DataLoader(loader.dataset, loader.batch_size * NUM_MICROBATCHES, shuffle=True)
    model, optimizer, *_ = run.prepare(model, optimizer, scheduler, whole)
    counted = {"epochs": 0}
    run.keep(counted)
    for epoch, steps in run.epochs(EPOCHS, NUM_MICROBATCHES, split_batches=True):
        counted["epochs"] += 1
        for group in optimizer.param_groups:
            group["lr"] *= FACTOR
        drawn = torch.rand(2)
        model.train()
        for step in steps:
            with step:
                for number, (points, labels) in enumerate(step.batches()):
                    if step.number in (SIZE + 1, 2 * SIZE + 1, 3 * SIZE + 3) and number == 1:
                        die_once(step, f"step {step.number}")
                    step.backward(nn.functional.cross_entropy(model(points), labels))
        model.eval()
        note_values(epoch, "epoch", {"counted": torch.tensor(counted["epochs"]), "drawn": drawn})


def leaves_epochs(run: Run) -> None:
    model, _, scheduler, _ = run.prepare(*build())
    for epoch, steps in run.epochs(EPOCHS, NUM_MICROBATCHES, first=1):
        train_epoch(steps, model)
        scheduler.step()
        if run.is_first_worker:
            note_values(epoch, "epoch", values_of(model))
        if epoch == LEFT_AFTER + 1:
            break
    note_values(NUM_STEPS, "below", values_of(model))


def leaves_last_epoch(run: Run) -> None:
    """A number of steps ends the loop, as `max_train_steps` does."""
    model, *_ = run.prepare(*build())
    for epoch, steps in run.epochs(EPOCHS, NUM_MICROBATCHES):
        assert len(steps) == SIZE
        for step in steps:
            with step:
                compute(step, model)
            if step.committed and step.number == NUM_STEPS - 2:
                break
        note_values(epoch, "epoch", values_of(model))
    note_values(NUM_STEPS, "below", values_of(model))


def leaves_within_epoch(run: Run) -> None:
    model, *_ = run.prepare(*build())
    for _, steps in run.epochs(EPOCHS, NUM_MICROBATCHES):
        for step in steps:
            with step:
                compute(step, model)
            if step.committed and step.number == 2:
                break


def reads_epoch_twice(run: Run) -> None:
    model, *_ = run.prepare(*build())
    for _, steps in run.epochs(EPOCHS, NUM_MICROBATCHES):
        for _ in range(2):
            for step in steps:
                with step:
                    compute(step, model)


def unknown_length(run: Run, steps_per_epoch: int | None = None) -> None:
    model, optimizer, *_ = build()
    run.prepare(model, optimizer)
    run.draw(torch.zeros, 2, 2)
    for _ in run.epochs(EPOCHS, steps_per_epoch=steps_per_epoch):
        """No epoch is known."""


def plain_by_epochs(
    is_scheduled: bool = True, first_factor: float = 1.0
) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """The loss of each step, and the values after it."""
    model, optimizer, scheduler, loader = build()
    for group in optimizer.param_groups:
        group["lr"] *= first_factor
    losses = plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES)
    for number, loss in enumerate(losses, start=1):
        yield loss, {name: value.clone() for name, value in values_of(model).items()}
        if number % SIZE == 0 and is_scheduled:
            scheduler.step()
