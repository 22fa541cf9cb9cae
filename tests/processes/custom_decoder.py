"""A recipe of a causal decoder that takes positions from its batch, and its plain loop."""

from __future__ import annotations

import torch
from loops import die_once
from torch import nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from elastic.geometry.sample_order import sample_of
from pipelines.loop import Run
from pipelines.run.recipes import with_custom_model
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe

NUM_SAMPLES, LENGTH, WIDTH, VOCABULARY = 32, 11, 8, 7
SETTINGS = TrainSettings(batch=6, microbatch=2, steps=12, dtype="float64", seed=5)
SEQUENCE = {"tokens": 1, "positions": 1, "targets": 1}
KILLED = 5


class Sequences:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
        targets = torch.where(torch.rand(LENGTH, generator=generator) < 0.7, text[1:], -100)
        return {"tokens": text[:-1], "positions": torch.arange(LENGTH), "targets": targets}


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.place(positions)
        return self.head(hidden + self.attend(hidden))

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(hidden).unflatten(-1, (3, 2, -1)).movedim(2, 0).transpose(2, 3)
        attended = scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class CountingDecoder(Decoder):
    """It takes positions from the length of its input."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))


class RecomputingDecoder(Decoder):
    """It computes its attention again in backward, where nothing would notice other values."""

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().attend, hidden, use_reentrant=True)


class DroppingDecoder(Decoder):
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return dropout(super().forward(tokens, positions), 0.1)


def loss(model, batch):
    logits, targets = model(batch["tokens"], batch["positions"]), batch["targets"]
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def optimizer(named):
    return torch.optim.SGD(named, lr=0.2, momentum=0.9)


def recipe() -> Recipe:
    return Recipe(Decoder, loss, optimizer, Sequences, SETTINGS, sequence=SEQUENCE)


CUSTOM_SETTINGS = with_custom_model(recipe()).settings


def train(run: Run, model: type[nn.Module] = Decoder, has_weight: bool = True) -> None:
    """A loop in which a worker dies in a forward pass."""
    torch.manual_seed(0)
    net = model().double()
    loader = DataLoader(Sequences(), batch_size=SETTINGS.microbatch, shuffle=True)
    adam = optimizer(list(net.named_parameters()))
    net, _, _ = run.prepare(net, adam, loader, sequence=SEQUENCE)
    for step in run.steps(SETTINGS.steps, SETTINGS.num_microbatches):
        with step:
            for number, batch in enumerate(step.batches()):
                if step.number == KILLED and number == 1:
                    die_once(step, "forward")
                total, count = loss(net, batch)
                step.backward(total / count.clamp(min=1), weight=count if has_weight else None)


def train_in_one_process(seed: int = SETTINGS.seed) -> list[float]:
    torch.manual_seed(seed)
    net, data, losses = Decoder().double(), Sequences(), []
    sgd = optimizer(list(net.named_parameters()))
    for step in range(SETTINGS.steps):
        first = step * SETTINGS.batch
        ids = [sample_of(seed, first + i, NUM_SAMPLES) for i in range(SETTINGS.batch)]
        samples = [data[index] for index in ids]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in SEQUENCE}
        total, count = loss(net, batch)
        (total / count).backward()
        sgd.step()
        sgd.zero_grad()
        losses.append((total / count).item())
    return losses
