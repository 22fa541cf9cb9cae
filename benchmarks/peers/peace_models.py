"""The models of `peace.py` as recipes, from which the peers build the same model, loss and data.

    elastic train benchmarks/peers/peace_models.py:gpt --workers 2

All data is generated once, when a process opens it. Gradients are clipped to the global norm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe

VOCABULARY = 256
LENGTH = 128
WIDTH = 128
NUM_HEADS = 4
NUM_LAYERS = 4
DROPOUT = 0.1
DIMS = (512, 1024, 1024, 512)
CHANNELS = (3, 32, 64, 128)
IMAGE_SIZE = 32
NUM_CLASSES = 10
NUM_SAMPLES = 2048
NUM_MICROBATCHES = 8
MAX_GRAD_NORM = 1.0
Named = Sequence[tuple[str, Tensor]]


class Layer(nn.Module):
    """Causal attention and a feed-forward network, each after a normalization."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.norm(hidden)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        hidden = hidden + self.projection(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(hidden)


class Gpt(nn.Module):
    """A GPT of four layers, with the output head tied to the embedding of tokens."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.embedding(tokens) + self.positions(positions))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class ConvolutionalNet(nn.Module):
    """Three strided convolutions with group normalization, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1), nn.GroupNorm(8, o), nn.ReLU())
            for i, o in pairwise(CHANNELS)
        )
        self.head = nn.Linear(CHANNELS[-1], NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.layers:
            images = layer(images)
        return self.head(images.mean((2, 3)))


def make_mlp() -> nn.Sequential:
    layers: list[nn.Module] = []
    for first, second in pairwise(DIMS):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def sequences() -> TensorDataset:
    """Arithmetic sequences modulo the vocabulary, with one token more than the model reads."""
    generator = torch.Generator().manual_seed(0)
    starts, strides = torch.randint(VOCABULARY, (2, NUM_SAMPLES, 1), generator=generator)
    return TensorDataset((starts + strides * torch.arange(LENGTH + 1)) % VOCABULARY)


def vectors() -> TensorDataset:
    """Random vectors and their sines."""
    inputs = torch.randn(NUM_SAMPLES, DIMS[0], generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sin())


def images() -> TensorDataset:
    """Random images, shifted by a number for each class, and their classes."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(NUM_SAMPLES, CHANNELS[0], IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    labels = torch.arange(NUM_SAMPLES) % NUM_CLASSES
    return TensorDataset(noise + labels[:, None, None, None] / NUM_CLASSES, labels)


def token_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    [tokens] = batch
    targets = tokens[:, 1:].flatten()
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits, targets, reduction="sum"), targets.numel()


def vector_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets, reduction="none").mean(1)


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels, reduction="none")


def adamw(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3, betas=(0.9, 0.95), fused=True)


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True)


def settings_of(batch: int) -> TrainSettings:
    return TrainSettings(batch=batch, microbatch=batch // NUM_MICROBATCHES)


def gpt() -> Recipe:
    return _gpt(lambda: Gpt(dropout=0.0))


def gpt_dropout() -> Recipe:
    return _gpt(lambda: Gpt(DROPOUT))


def _gpt(model: Callable[[], nn.Module]) -> Recipe:
    return Recipe(
        model=model,
        loss=token_loss,
        optimizer=adamw,
        data=sequences,
        max_grad_norm=MAX_GRAD_NORM,
        settings=settings_of(batch=16),
    )


def mlp() -> Recipe:
    return Recipe(
        model=make_mlp,
        loss=vector_loss,
        optimizer=adamw,
        data=vectors,
        max_grad_norm=MAX_GRAD_NORM,
        settings=settings_of(batch=64),
    )


def conv() -> Recipe:
    return Recipe(
        model=ConvolutionalNet,
        loss=image_loss,
        optimizer=sgd,
        data=images,
        max_grad_norm=MAX_GRAD_NORM,
        settings=settings_of(batch=128),
    )
