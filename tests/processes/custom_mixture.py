"""A recipe whose module declares its experts, and its plain loop."""

from __future__ import annotations

import torch
from loops import die_once
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from elastic.geometry.sample_order import sample_of
from pipelines.loop import Run
from pipelines.run.recipes import with_custom_model
from pipelines.settings import CheckpointSettings, TrainSettings
from pipelines.settings.recipe import Recipe

NUM_SAMPLES, WIDTH, NUM_CLASSES, NUM_EXPERTS, TOP_K = 32, 8, 5, 4, 2
KILLED = 3
SETTINGS = TrainSettings(
    batch=8,
    microbatch=2,
    steps=8,
    dtype="float64",
    seed=5,
    eval_every=0,
    checkpoint=CheckpointSettings(every=3),
)


class Vectors:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.tensor(index % NUM_CLASSES)


class TwoLayerExperts(nn.Module):
    """Two stacked layers; dim 0 is the expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, 12, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(NUM_EXPERTS, 12) / 3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 12) / 3)

    def forward(self, tokens, chosen, weights):
        hidden = torch.einsum("tkod,td->tko", self.up[chosen], tokens) + self.bias[chosen]
        outputs = torch.einsum("tkdo,tko->tkd", self.down[chosen], hidden.relu())
        return (outputs * weights[..., None]).sum(1)


class NormedExperts(TwoLayerExperts):
    """Each output depends on all experts, so that they cannot be dealt to ranks."""

    def forward(self, tokens, chosen, weights):
        return super().forward(tokens, chosen, weights) / self.up.norm()


class Mixture(nn.Module):
    def __init__(self, kind: type[nn.Module] = TwoLayerExperts) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(WIDTH, NUM_EXPERTS) for _ in range(2))
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.imbalance: torch.Tensor | float = 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.imbalance = 0.0
        for router, experts in zip(self.routers, self.layers, strict=True):
            probabilities = router(tokens).softmax(-1)
            weights, chosen = probabilities.topk(TOP_K)
            tokens = tokens + experts(tokens, chosen, weights)
            used = nn.functional.one_hot(chosen, NUM_EXPERTS).to(tokens).mean((0, 1))
            self.imbalance = self.imbalance + NUM_EXPERTS * (used @ probabilities.mean(0))
        return self.head(tokens)


def loss(model, batch):
    """With a load-balancing loss, which is not linear in the samples of a microbatch."""
    return cross_entropy(model(batch[0]), batch[1]) + 0.1 * model.imbalance


def optimizer(named):
    return torch.optim.AdamW(named, lr=0.01)


def recipe() -> Recipe:
    return Recipe(Mixture, loss, optimizer, Vectors, SETTINGS, experts=["layers.*"])


CUSTOM_SETTINGS = with_custom_model(recipe()).settings


def train(run: Run, kind: type[nn.Module] = TwoLayerExperts) -> None:
    """A loop in which a worker dies in a forward pass."""
    torch.manual_seed(0)
    net = Mixture(kind).double()
    loader = DataLoader(Vectors(), batch_size=SETTINGS.microbatch, shuffle=True)
    adam = optimizer(list(net.named_parameters()))
    net, _, _ = run.prepare(net, adam, loader, experts=["layers.*"])
    for step in run.steps(SETTINGS.steps, SETTINGS.num_microbatches):
        with step:
            for number, batch in enumerate(step.batches()):
                if step.number == KILLED and number == 1:
                    die_once(step, "forward")
                step.backward(loss(net, batch))


def train_in_one_process(seed: int = SETTINGS.seed) -> list[float]:
    """The usual script: the gradients of the microbatches' mean losses are accumulated."""
    torch.manual_seed(seed)
    net, data, losses = Mixture().double(), Vectors(), []
    adam, number = optimizer(list(net.named_parameters())), SETTINGS.num_microbatches
    for step in range(SETTINGS.steps):
        first, total = step * SETTINGS.batch, 0.0
        for begin in range(first, first + SETTINGS.batch, SETTINGS.microbatch):
            ids = [sample_of(seed, begin + i, NUM_SAMPLES) for i in range(SETTINGS.microbatch)]
            vectors, classes = (
                torch.stack(part) for part in zip(*map(data.__getitem__, ids), strict=True)
            )
            mean = loss(net, (vectors.double(), classes))
            (mean / number).backward()
            total += mean.item() / number
        adam.step()
        adam.zero_grad()
        losses.append(total)
    return losses
