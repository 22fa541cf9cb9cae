"""A recipe whose module is a chain of blocks, and the plain loop that trains it in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from elastic.geometry.sample_order import keyed_seed, microbatch_seed, sample_of
from pipelines.run.recipes import with_custom_model
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.workload.seeds import forward_seed

NUM_SAMPLES, LENGTH, WIDTH, VOCABULARY = 40, 5, 8, 11
NUM_EVALUATED = 7
MAX_NORM = 0.5
SETTINGS = TrainSettings(
    batch=10,
    microbatch=2,
    steps=60,
    dtype="float64",
    seed=3,
    eval_every=20,
    eval_samples=NUM_EVALUATED,
)


class Tokens:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        is_known = torch.rand(LENGTH, generator=generator) < 0.7
        return {"tokens": tokens, "targets": torch.where(is_known, tokens.roll(1), -100)}


class Mixer(nn.Module):
    """A chain with BatchNorm, dropout, and a buffer that does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = hidden + self.norm(hidden).mean(1, keepdim=True) * self.scale
        wide = dropout(self.up(mixed).relu(), 0.2, self.training)
        return dropout(mixed + self.down(wide), 0.1, self.training)


class Net(nn.Module):
    """A chain with a frozen embedding, whose output needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.embed.weight.requires_grad_(False)
        self.layers = nn.ModuleList(Mixer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class TiedNet(Net):
    """The head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(True)
        self.head.weight = self.embed.weight


def loss(model, batch):
    """The loss over the known tokens, whose number differs between microbatches. In training it
    draws before and after the model."""
    tokens, targets = batch["tokens"], batch["targets"].flatten()
    if model.training:
        tokens = torch.where(torch.rand(tokens.shape) < 0.1, 0, tokens)
    total = cross_entropy(model(tokens).flatten(0, 1), targets, reduction="sum")
    if model.training:
        total = total * (1 + 0.1 * torch.rand(()))
    return total, (targets != -100).sum()


def accuracy(model, batch):
    is_known = batch["targets"] != -100
    is_right = (model(batch["tokens"]).argmax(-1) == batch["targets"]) & is_known
    return is_right.double().sum(), is_known.sum()


def optimizer(named):
    return torch.optim.SGD(named, lr=0.2, momentum=0.9)


def recipe() -> Recipe:
    return Recipe(
        Net,
        loss,
        optimizer,
        Tokens,
        SETTINGS,
        max_grad_norm=MAX_NORM,
        held_out=Tokens,
        metrics={"accuracy": accuracy},
        plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"},
        pipeline=["embed", "layers.*", "head"],
    )


def tied_recipe() -> Recipe:
    return replace(recipe(), model=TiedNet, plan={})


CUSTOM_SETTINGS = with_custom_model(recipe()).settings


def train_in_one_process(
    microbatch: int, make_net: Callable[[], Net] = Net
) -> tuple[list[float], dict[int, list[float]], dict[str, torch.Tensor]]:
    """Return the loss of each step, loss and accuracy of each evaluation, and the final state."""
    torch.manual_seed(SETTINGS.seed)
    net, data = make_net().double(), Tokens()
    sgd = optimizer([(name, p) for name, p in net.named_parameters() if p.requires_grad])
    losses, evaluations, seeds = [], {}, SeedsOfBlocks(net)
    for step in range(1, SETTINGS.steps + 1):
        first = (step - 1) * SETTINGS.batch
        ids = [sample_of(SETTINGS.seed, first + i, NUM_SAMPLES) for i in range(SETTINGS.batch)]
        losses.append(accumulate_gradients(net, [data[i] for i in ids], microbatch, step, seeds))
        torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        sgd.step()
        sgd.zero_grad()
        if step % SETTINGS.eval_every == 0:
            held_out = collate_samples([data[index] for index in range(NUM_EVALUATED)])
            net.eval()
            with torch.no_grad():
                sums = [function(net, held_out) for function in (loss, accuracy)]
            net.train()
            evaluations[step] = [(total / count).item() for total, count in sums]
    return losses, evaluations, net.state_dict()


class SeedsOfBlocks:
    """Seeds at the beginning of each block of a net in training, and behind the last."""

    def __init__(self, net: Net) -> None:
        self.net, self.seed = net, 0
        for number, block in enumerate([net.embed, *net.layers, net.head]):
            block.register_forward_pre_hook(partial(self.enter, number))
        net.head.register_forward_hook(partial(self.enter, number + 1))

    def begin(self, seed: int) -> None:
        self.seed = seed
        torch.manual_seed(forward_seed(seed))

    def enter(self, number: int, *ignored) -> None:
        if self.net.training:
            torch.manual_seed(keyed_seed("block", self.seed, number))


def accumulate_gradients(net, samples, microbatch: int, step: int, seeds: SeedsOfBlocks) -> float:
    """Run forward and backward passes; all microbatches start with the same buffers.

    Afterwards each buffer is the mean over the microbatches.
    """
    buffers_before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    count = (collate_samples(samples)["targets"] != -100).sum()
    buffers_after, mean_loss = [], 0.0
    for first in range(0, len(samples), microbatch):
        for name, buffer in net.named_buffers():
            buffer.copy_(buffers_before[name])
        seeds.begin(microbatch_seed(SETTINGS.seed, step, first // microbatch))
        total, _ = loss(net, collate_samples(samples[first : first + microbatch]))
        (total / count).backward()
        mean_loss += (total / count).item()
        buffers_after.append(
            {name: buffer.double().clone() for name, buffer in net.named_buffers()}
        )
    for name, buffer in net.named_buffers():
        buffer.copy_(torch.stack([buffers[name] for buffers in buffers_after]).mean(0))
    return mean_loss


def collate_samples(samples) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
