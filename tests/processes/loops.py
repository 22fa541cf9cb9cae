"""Custom training loops, some with one mistake, and the plain loop that each must equal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from elastic.geometry.model_limits import Limits
from elastic.geometry.sample_order import microbatch_seed, sample_of
from pipelines.loop import Run, Step
from pipelines.loop.script import script_of
from pipelines.run.custom_plan import refuse_unfit_recipe
from pipelines.run.program import TrainingProgram
from pipelines.training.workload.seeds import forward_seed

FOLDER = "LOOP_FOLDER"
NUM_STEPS, NUM_MICROBATCHES, MICROBATCH = 24, 6, 4
KILLED = (8, 16)
"""A worker dies in a forward pass of the first step, and in a backward pass of the second."""


def limits_of_loop(function: Callable[..., None]) -> Limits:
    """The limits that are known of a loop's model before its run, which tries out its body."""
    script = script_of(function)
    program = TrainingProgram(script.settings.model_dump(mode="json"), device="cpu", recipe=script)
    refuse_unfit_recipe(program, tries_body=True)
    return program.workload.limits()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2)
        )
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.dropout(hidden))


def build_training(
    num_readers: int = 0, is_scheduled: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(3)
    model = Net().to(dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim <= 1]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = None
    if is_scheduled:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 12)
    data = TensorDataset(torch.randn(100, 8).to(dtype), torch.arange(100) % 3)
    loader = DataLoader(
        data,
        batch_size=MICROBATCH,
        shuffle=True,
        num_workers=num_readers,
        worker_init_fn=note_reader if num_readers else None,
    )
    return model, optimizer, scheduler, loader


def train(run: Run, num_readers: int = 0) -> None:
    """A loop in which workers die twice, and which records the step numbers that it gets."""
    model, optimizer, scheduler, loader = build_training(num_readers)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    step_numbers = Path(os.environ.get(FOLDER, os.devnull), f"steps-{os.getpid()}")
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        if FOLDER in os.environ:
            with open(step_numbers, "a") as file:
                file.write(f"{step.number} ")
        with step:
            for number, (points, labels) in enumerate(step.batches()):
                if step.number == KILLED[0] and number == 1:
                    die_once(step, "forward")
                loss = nn.functional.cross_entropy(model(points), labels)
                if step.number == KILLED[1] and number == 1:
                    loss.register_hook(lambda gradient, step=step: die_once(step, "backward"))
                step.backward(loss)
        if step.committed:
            scheduler.step()


def train_with_readers(run: Run) -> None:
    """The same with two reader processes for each worker, each of which leaves a mark."""
    train(run, num_readers=2)


def note_reader(number: int) -> None:
    _note(f"reader-{os.getppid()}-{number}", str(os.getpid()))


class Wide(nn.Module):
    """Two layers for `tp`, with dropout between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.dropout(self.up(hidden).tanh())
        return self.head(hidden + self.dropout(self.down(wide)))


def build_wide() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    *_, loader = build_training()
    torch.manual_seed(5)
    model = Wide().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader


def train_planned(run: Run) -> None:
    """A loop whose model has a plan; it saves the final weights."""
    plan = {"up": "colwise", "down": "rowwise"}
    model, _, _ = run.prepare(*build_wide(), plan=plan)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for points, labels in step.batches():
                step.backward(nn.functional.cross_entropy(model(points), labels))
    torch.save(model.state_dict(), Path(os.environ[FOLDER]) / "weights.pt")


def train_suppressing_exceptions(run: Run) -> None:
    """A loop that suppresses every exception, including those of other workers' deaths."""
    model, optimizer, scheduler, loader = build_training()
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            try:
                for points, labels in step.batches():
                    if step.number == KILLED[0]:
                        die_once(step, "forward")
                    step.backward(nn.functional.cross_entropy(model(points), labels))
            except Exception:
                pass
        if step.committed:
            scheduler.step()


def train_and_raise(run: Run) -> None:
    """A loop that raises at one step."""
    model, *_ = run.prepare(*build_training())
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for points, labels in step.batches():
                loss = nn.functional.cross_entropy(model(points), labels)
                if step.number == KILLED[0]:
                    raise ValueError("the script's own mistake")
                step.backward(loss)


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    loader: DataLoader[Any],
    num_steps: int,
    num_microbatches: int,
    criterion: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> Iterator[float]:
    """The loss of each step in one process.

    A step's buffers are the mean of its microbatches' updates of the buffers of the step before.
    """
    data = loader.dataset
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        buffers_before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        buffer_sums = {
            name: torch.zeros_like(b, dtype=torch.float64) for name, b in buffers_before.items()
        }
        total_loss = 0.0
        for microbatch in range(num_microbatches):
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers_before[name])
            torch.manual_seed(microbatch_seed(0, step, microbatch))
            first = ((step - 1) * num_microbatches + microbatch) * loader.batch_size
            ids = range(first, first + loader.batch_size)
            samples = [data[sample_of(0, sample_id, len(data))] for sample_id in ids]
            torch.manual_seed(forward_seed(microbatch_seed(0, step, microbatch)))
            points, labels = default_collate(samples)
            points = points.to(next(model.parameters()).dtype)
            loss = criterion(model(points), labels) / num_microbatches
            loss.backward()
            total_loss += loss.item()
            for name, buffer in model.named_buffers():
                buffer_sums[name] += buffer / num_microbatches
        for name, buffer in model.named_buffers():
            value = buffer_sums[name]
            buffer.copy_(value if buffer.is_floating_point() else value.round())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        yield total_loss


def die_once(step: Step, moment: str) -> None:
    """Kill one worker that is not the first, the first time that this is called."""
    folder = os.environ.get(FOLDER)
    if folder is None or step.is_first_worker:
        return
    try:
        (Path(folder) / moment).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _note(name: str, text: str) -> None:
    folder = os.environ.get(FOLDER)
    if folder is not None:
        (Path(folder) / name).write_text(text)
