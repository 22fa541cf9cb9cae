"""Scripts that train on data without a length, and their plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from loops import MICROBATCH, NUM_MICROBATCHES, NUM_STEPS
from script_habits import build_container, compute
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pipelines.loop import Run

LENGTH = 137
"""The stream begins again within a step."""


class Texts(IterableDataset[tuple[Tensor, int]]):
    """Yields noisy samples, whose noise depends on the epoch, and notes what it has yielded."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in range(LENGTH):
            generator = torch.Generator().manual_seed(1000 * self.epoch + number)
            yield torch.randn(8, generator=generator).double(), number % 3


class Sharing(Texts):
    """Divides its samples among torch's reader processes, as its documentation says."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        readers = get_worker_info()
        first, step = (readers.id, readers.num_workers) if readers else (0, 1)
        return islice(super().__iter__(), first, None, step)


def stream(run: Run, dataset: Texts, num_readers: int = 0) -> None:
    model, optimizer, _ = build_container()
    loader = DataLoader(dataset, batch_size=MICROBATCH, num_workers=num_readers)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
            optimizer.step()


def texts(run: Run) -> None:
    stream(run, Texts())


def texts_by_readers(run: Run) -> None:
    stream(run, Sharing(), num_readers=2)


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A generator function of whole batches, fewer than a run has."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(31):
        yield torch.randn(4, 8, generator=generator).double(), (torch.arange(4) + number) % 3


def by_generator(run: Run) -> None:
    """Epochs of a length that the script gives."""
    model, optimizer, _ = build_container()
    model, optimizer = run.prepare(model, optimizer)
    run.draw(batches, 7)
    for epoch, steps in run.epochs(3, NUM_MICROBATCHES, first=1, steps_per_epoch=NUM_STEPS // 3):
        for step in steps:
            with step:
                compute(step, model)
                optimizer.step()
            if step.committed:
                assert epoch == 1 + (step.number - 1) * 3 // NUM_STEPS


def plain_by_generator() -> Iterator[float]:
    model, optimizer, _ = build_container()
    passes = cycle(batches(7))
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for points, labels in islice(passes, NUM_MICROBATCHES):
            loss = nn.functional.cross_entropy(model(points), labels) / NUM_MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        yield total


def plain_losses() -> Iterator[float]:
    model, optimizer, _ = build_container()
    samples = endless(Texts())
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(NUM_MICROBATCHES):
            points, labels = zip(*(next(samples) for _ in range(MICROBATCH)), strict=True)
            outputs = model(torch.stack(points))
            loss = nn.functional.cross_entropy(outputs, torch.tensor(labels)) / NUM_MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        yield total


def endless(dataset: Texts) -> Iterator[Any]:
    while True:
        yield from dataset
        dataset.set_epoch(dataset.epoch + 1)
