"""A small Llama, with a complex buffer as Meta's and torchtitan's have: a recipe with the plans of
torch's tutorial and of torchtitan, a custom training loop, and the plain loop."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention, silu
from torch.utils.data import DataLoader

from elastic.geometry.sample_order import microbatch_seed, sample_of
from pipelines.loop import Run
from pipelines.run.recipes import with_custom_model
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.workload.seeds import forward_seed

NUM_SAMPLES, LENGTH, WIDTH, HEADS, VOCABULARY = 32, 6, 16, 4, 11
ATTENTION_DROPOUT = 0.1
SETTINGS = TrainSettings(batch=8, microbatch=2, steps=16, dtype="float64", seed=5)

LAYER_OF_TUTORIAL = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), Replicate()),
        desired_input_layouts=(Replicate(), Replicate()),
    ),
    "attention.wq": ColwiseParallel(use_local_output=False),
    "attention.wk": ColwiseParallel(use_local_output=False),
    "attention.wv": ColwiseParallel(use_local_output=False),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
    ),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "feed_forward.w3": ColwiseParallel(),
}
LAYER_OF_TITAN = LAYER_OF_TUTORIAL | {
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), None),
        desired_input_layouts=(Replicate(), None),
    ),
    "attention.q_norm": SequenceParallel(sequence_dim=2),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
}
OUTSIDE = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
OUTSIDE_OF_TITAN = OUTSIDE | {
    "output": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


def plan_of(outside, layer):
    return outside | {f"layers.*.{name}": style for name, style in layer.items()}


class Tokens:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)


def rotated(heads: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, False) for _ in range(4))
        self.q_norm = nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        size = WIDTH // HEADS
        q, k, v = (layer(x).unflatten(-1, (-1, size)) for layer in (self.wq, self.wk, self.wv))
        q, k = rotated(self.q_norm(q), freqs_cis), rotated(k, freqs_cis)
        heads = [part.transpose(1, 2) for part in (q, k, v)]
        rate = ATTENTION_DROPOUT if self.training else 0.0
        attended = scaled_dot_product_attention(*heads, dropout_p=rate, is_causal=True)
        attended = dropout(attended, 0.1, self.training)
        return self.wo(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = silu(self.w1(x)) * self.w3(x)
        noise = torch.empty_like(wide).uniform_(0.9, 1.1) if self.training else 1.0
        return dropout(self.w2(dropout(wide, 0.2, self.training) * noise), 0.1, self.training)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), freqs_cis)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.arange(LENGTH)[:, None] / 10.0 ** torch.arange(WIDTH // HEADS // 2)
        rotations = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("freqs_cis", rotations, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.freqs_cis)
        return self.output(self.norm(x))


def loss(model, batch):
    logits = model(batch[:, :-1]).flatten(0, 1)
    losses = cross_entropy(logits, batch[:, 1:].flatten(), reduction="none")
    return losses.view(len(batch), -1).mean(1)


def optimizer(named):
    return torch.optim.SGD(named, lr=0.2, momentum=0.9)


def of_tutorial() -> Recipe:
    plan = plan_of(OUTSIDE, LAYER_OF_TUTORIAL)
    return Recipe(Llama, loss, optimizer, Tokens, SETTINGS, plan=plan, tp_divides=HEADS)


def of_titan() -> Recipe:
    return replace(of_tutorial(), plan=plan_of(OUTSIDE_OF_TITAN, LAYER_OF_TITAN))


CUSTOM_SETTINGS = with_custom_model(of_tutorial()).settings
"""Of the recipes and of the loop."""


def train(run: Run) -> None:
    model = Llama().double()
    sgd = optimizer(model.parameters())
    loader = DataLoader(Tokens(), batch_size=SETTINGS.microbatch, shuffle=True)
    model, sgd, loader = run.prepare(model, sgd, loader)
    for step in run.steps(SETTINGS.steps, microbatches=SETTINGS.num_microbatches):
        with step:
            for batch in step.batches():
                step.backward(loss(model, batch).mean())


def train_in_one_process() -> list[float]:
    torch.manual_seed(SETTINGS.seed)
    net, data, losses = Llama().double(), Tokens(), []
    sgd, size = optimizer(list(net.named_parameters())), SETTINGS.microbatch
    for step in range(1, SETTINGS.steps + 1):
        mean = 0.0
        for number in range(SETTINGS.num_microbatches):
            first = (step - 1) * SETTINGS.batch + number * size
            ids = [sample_of(SETTINGS.seed, first + i, NUM_SAMPLES) for i in range(size)]
            torch.manual_seed(forward_seed(microbatch_seed(SETTINGS.seed, step, number)))
            part = loss(net, torch.stack([data[i] for i in ids])).sum() / SETTINGS.batch
            part.backward()
            mean += part.item()
        sgd.step()
        sgd.zero_grad()
        losses.append(mean)
    return losses
