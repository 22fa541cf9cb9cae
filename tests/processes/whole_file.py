"""A script without a function: its run is `current_run()`, and its objects are global."""

from __future__ import annotations

from loader_scripts import EPOCHS, GAMMA, SIZE, build
from loops import NUM_MICROBATCHES, NUM_STEPS, die_once
from script_habits import note_values
from torch import nn, tensor
from torch.optim.lr_scheduler import StepLR

from pipelines.loop import current_run

run = current_run()
model, optimizer, loader = build()
scheduler = StepLR(optimizer, 1, gamma=GAMMA)
model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
total = 0.0


def train_epoch() -> None:
    global total
    for points, labels in loader:
        optimizer.zero_grad()
        if run.step.number in (2, SIZE + 1):
            die_once(run.step, f"step {run.step.number}")
        loss = nn.functional.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item()


if __name__ == "__main__":
    for _ in run.range(EPOCHS, microbatches=NUM_MICROBATCHES):
        train_epoch()
    note_values(NUM_STEPS, "below", {"total": tensor(total)})
