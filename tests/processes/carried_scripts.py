"""Truncated backpropagation through time: a loop whose microbatches carry hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from loops import MICROBATCH, NUM_MICROBATCHES, NUM_STEPS, die_once
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pipelines.loop import Run

BATCH, LENGTH, NUM_SEGMENTS, VOCABULARY, WIDTH = NUM_MICROBATCHES * MICROBATCH, 5, 10, 12, 6


class Segments(Dataset[Tensor]):
    """Sequences cut into segments: a batch has the same segment of each, the next batch the next
    one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        noise = torch.randint(3, (BATCH, NUM_SEGMENTS * LENGTH + 1), generator=generator)
        self.tokens = noise.cumsum(1) % VOCABULARY

    def __len__(self) -> int:
        return BATCH * NUM_SEGMENTS

    def __getitem__(self, index: int) -> Tensor:
        segment, position = divmod(index, BATCH)
        return self.tokens[position, segment * LENGTH : (segment + 1) * LENGTH + 1]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        outputs, last = self.recurrent(self.embedding(tokens), hidden)
        return self.head(outputs), last


def build() -> tuple[Recurrent, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = Recurrent().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def carries(run: Run) -> None:
    """Workers die in a body that has set states, and between two steps."""
    model, optimizer = build()
    loader = DataLoader(Segments(), batch_size=MICROBATCH, shuffle=False)
    prepared: Any = run.prepare(model, optimizer, loader)
    model, optimizer, loader = prepared
    hidden = run.state(torch.zeros(2, MICROBATCH, WIDTH, dtype=torch.float64))
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            for number, tokens in enumerate(step.batches()):
                logits, last = model(tokens[:, :-1], hidden.value)
                hidden.value = last
                if step.number == 8 and number == 1:
                    die_once(step, "body")
                step.backward(loss_of(logits, tokens))
        if step.committed and step.number == 14:
            die_once(step, "between")


def plain_carries() -> Iterator[float]:
    """The loss of each step."""
    model, optimizer = build()
    data = Segments()
    hidden = torch.zeros(2, BATCH, WIDTH, dtype=torch.float64)
    for step in range(NUM_STEPS):
        tokens = torch.stack([data[(step * BATCH + i) % len(data)] for i in range(BATCH)])
        logits, last = model(tokens[:, :-1], hidden)
        hidden = last.detach()
        optimizer.zero_grad()
        loss = loss_of(logits, tokens)
        loss.backward()
        optimizer.step()
        yield loss.item()
