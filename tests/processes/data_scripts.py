"""Scripts whose data have an order of their own, and their plain loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from loops import MICROBATCH, NUM_MICROBATCHES, NUM_STEPS
from script_habits import build_container, compute
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from elastic.geometry.sample_order import keyed_seed
from pipelines.loop import Run
from pipelines.reading.endless import WithReplacement
from pipelines.reading.pass_reader import seed_host

Batch = tuple[Tensor, Tensor]
LENGTH = 50
"""Not a multiple of a step's batch."""
WEIGHTS = [float(number % 5) for number in range(LENGTH)]


def samples() -> TensorDataset:
    points = torch.randn(LENGTH, 8, generator=torch.Generator().manual_seed(2)).double()
    return TensorDataset(points, torch.arange(LENGTH) % 3)


def train(run: Run, loader: Any = None) -> None:
    model, optimizer, _ = build_container()
    model, optimizer = run.prepare(model, optimizer)
    if loader is not None:
        run.prepare(loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
            optimizer.step()


def in_sequence(run: Run) -> None:
    train(run, DataLoader(samples(), batch_size=MICROBATCH))


def in_whole_steps(run: Run) -> None:
    train(run, DataLoader(samples(), batch_size=MICROBATCH, drop_last=True))


def weighted(run: Run) -> None:
    sampler = WeightedRandomSampler(WEIGHTS, LENGTH)
    train(run, DataLoader(samples(), batch_size=MICROBATCH, sampler=sampler))


def replaced(run: Run) -> None:
    sampler = RandomSampler(samples(), replacement=True, num_samples=7)
    train(run, DataLoader(samples(), batch_size=MICROBATCH, sampler=sampler, num_workers=1))


def get_batch(size: int) -> Batch:
    """As scripts draw windows of a text, by three libraries."""
    points, labels = samples().tensors
    chosen = torch.randint(LENGTH, (size,))
    shift = random.random() + np.random.rand()
    return points[chosen] + shift, labels[chosen]


def drawn(run: Run) -> None:
    run.draw(get_batch, MICROBATCH)
    train(run)


class Reader:
    """A reader with a position, as scripts write it."""

    def __init__(self) -> None:
        self.position = 0

    def next_batch(self) -> Batch:
        points, labels = samples().tensors
        chosen = torch.arange(self.position, self.position + MICROBATCH) % LENGTH
        self.position += MICROBATCH
        return points[chosen], labels[chosen]


class Batches(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        reader = Reader()
        while True:
            yield reader.next_batch()


def batches(run: Run) -> None:
    train(run, DataLoader(Batches(), batch_size=None))


def drawn_by_position(run: Run) -> None:
    run.draw(Reader().next_batch)
    train(run)


def yielded_by_chance(run: Run) -> None:
    """The generator function has a generator of its own, with another seed each time."""

    def batches() -> Iterator[torch.Tensor]:
        yield torch.rand(4, 8, generator=own)

    own = torch.Generator()
    own.seed()
    run.draw(batches)
    train(run)


class Buckets(Sampler[list[int]]):
    """Batches of neighbours, in an order that a counter of its own changes with each epoch."""

    def __init__(self) -> None:
        self.num_epochs = 0

    def __len__(self) -> int:
        return LENGTH // MICROBATCH

    def __iter__(self) -> Iterator[list[int]]:
        self.num_epochs += 1
        firsts = [number * MICROBATCH for number in range(len(self))]
        random.Random(self.num_epochs).shuffle(firsts)
        for first in firsts:
            yield [*range(first, first + MICROBATCH)]


def bucketed(run: Run) -> None:
    train(run, DataLoader(samples(), batch_sampler=Buckets(), num_workers=1))


def plain_bucketed(number: int) -> Batch:
    data, buckets = samples(), Buckets()
    epochs = [[*buckets] for _ in range(1 + number // len(buckets))]
    return default_collate([data[i] for i in epochs[-1][number % len(buckets)]])


def plain_in_sequence(number: int) -> Batch:
    data, first = samples(), number * MICROBATCH
    return default_collate([data[i % LENGTH] for i in range(first, first + MICROBATCH)])


def plain_in_whole_steps(number: int) -> Batch:
    """Of the batches that a plain loader with `drop_last` has in each epoch."""
    loader = DataLoader(samples(), batch_size=MICROBATCH * NUM_MICROBATCHES, drop_last=True)
    pieces = [piece for points, labels in loader for piece in _pieces(points, labels)]
    return pieces[number % len(pieces)]


def _pieces(points: Tensor, labels: Tensor) -> Iterator[Batch]:
    return zip(points.split(MICROBATCH), labels.split(MICROBATCH), strict=True)


def plain_weighted(number: int, weights: list[float] | None = WEIGHTS) -> Batch:
    data, first = WithReplacement(samples(), weights), number * MICROBATCH
    return default_collate([data[i] for i in range(first, first + MICROBATCH)])


def plain_replaced(number: int) -> Batch:
    return plain_weighted(number, None)


def plain_drawn(number: int) -> Batch:
    seed_host(keyed_seed("batch", 0, number))
    return get_batch(MICROBATCH)


PLAIN: dict[str, Callable[[int], Batch]] = {
    "in_sequence": plain_in_sequence,
    "in_whole_steps": plain_in_whole_steps,
    "weighted": plain_weighted,
    "replaced": plain_replaced,
    "drawn": plain_drawn,
    "batches": plain_in_sequence,
    "bucketed": plain_bucketed,
}


def plain_losses(batch: Callable[[int], Batch]) -> Iterator[float]:
    """The loss of each step of a loop over numbered microbatches."""
    model, optimizer, _ = build_container()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(step * NUM_MICROBATCHES, (step + 1) * NUM_MICROBATCHES):
            points, labels = batch(number)
            loss = nn.functional.cross_entropy(model(points), labels) / NUM_MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        yield total
