"""Recipes whose samples take 4 ms to read, for `data.py`."""

from __future__ import annotations

import time
from itertools import pairwise
from zlib import compress, decompress

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipelines.settings import ReadingSettings, TrainSettings
from pipelines.settings.recipe import Recipe

DIMS = (512, 1024, 1024, 512)
BATCH = 32
NUM_READERS = 2
SAMPLE_S = 0.004
PIXELS = compress(bytes(range(256)) * 2048)
"""512 KiB when decompressed, which takes about 0.2 ms."""
NUM_DECOMPRESSIONS = 20


class Vectors:
    """Random vectors; `read` is what happens before each is returned."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        self.read()
        return torch.randn(DIMS[0], generator=torch.Generator().manual_seed(index))

    def read(self) -> None:
        """Take the time of a sample."""
        raise NotImplementedError


class Decoded(Vectors):
    """Reading a sample computes for about 4 ms."""

    def read(self) -> None:
        for _ in range(NUM_DECOMPRESSIONS):
            decompress(PIXELS)


class Awaited(Vectors):
    """Reading a sample waits for 4 ms, as for a disk or a network."""

    def read(self) -> None:
        time.sleep(SAMPLE_S)


def model() -> nn.Module:
    layers: list[nn.Module] = []
    for first, second in pairwise(DIMS):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def loss(module: nn.Module, inputs: Tensor) -> Tensor:
    return mse_loss(module(inputs), inputs.sin(), reduction="none").mean(1)


def make_recipe(dataset: type[Vectors], num_readers: int = NUM_READERS) -> Recipe:
    return Recipe(
        model,
        loss,
        lambda named: torch.optim.AdamW((p for _, p in named), lr=1e-3, fused=True),
        dataset,
        TrainSettings(
            batch=BATCH,
            microbatch=BATCH // 8,
            steps=1_000_000,
            reading=ReadingSettings(num_readers=num_readers),
        ),
        max_grad_norm=1.0,
    )


def decoded() -> Recipe:
    return make_recipe(Decoded)


def awaited() -> Recipe:
    """Two readers take about as long as a step: 16 samples of a worker, 4 ms each."""
    return make_recipe(Awaited)


def hidden() -> Recipe:
    """Eight readers are faster than training."""
    return make_recipe(Awaited, num_readers=8)
