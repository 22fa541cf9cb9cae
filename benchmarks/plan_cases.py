"""The models and layouts of `plan.py`, none of which calibrates anything."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import load
from pipelines.settings import (
    DataSettings,
    HuggingFaceSettings,
    TrainSettings,
    TransformerSettings,
)
from pipelines.settings.recipe import Recipe

NUM_WORKERS = 4
DATA_LAYOUTS = (
    "dp=2",
    "fsdp=2",
    "fsdp=2,zero=1",
    "dp=4",
    "fsdp=4",
    "fsdp=4,zero=2",
    "dp=2,fsdp=2",
)
MODEL_LAYOUTS = ("tp=2", "pp=2", "cp=2", "dp=2,tp=2", "fsdp=2,tp=2", "pp=2,dp=2", "tp=4")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
COMMON: dict[str, Any] = {
    "data": DataSettings(source="random", seq_len=128),
    "batch": 16,
    "microbatch": 1,
    "eval_every": 0,
}
NUM_CLASSES = 10


class Images(Dataset[tuple[Tensor, int]]):
    """Images of noise, in memory."""

    def __init__(self) -> None:
        self.images = torch.randn(256, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % NUM_CLASSES


class ConvNet(nn.Module):
    """Convolutions of growing width, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 48, 96, 192, 384)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1), nn.GroupNorm(8, o), nn.ReLU())
            for i, o in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        logits: Tensor = self.head(images.mean((2, 3)))
        return logits


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def conv_net() -> Recipe:
    return Recipe(
        model=ConvNet,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        data=Images,
        settings=TrainSettings(batch=48, microbatch=4, eval_every=0),
    )


def program_of(model: str) -> TrainingProgram:
    if model == "conv net":
        name = f"{__file__}:conv_net"
        recipe = load(name)
        assert isinstance(recipe, Recipe)
        settings = recipe.settings
        return TrainingProgram(settings.model_dump(mode="json"), device="cpu", recipe=name)
    config = (
        HuggingFaceSettings(config=LLAMA)
        if model == "llama"
        else TransformerSettings(dim=256, num_layers=4, num_heads=4, hidden_dim=688)
    )
    settings = TrainSettings(**{**COMMON, "model": config})
    return TrainingProgram(settings.model_dump(mode="json"), device="cpu")


MODELS = {
    "gpt": (*DATA_LAYOUTS, *MODEL_LAYOUTS),
    "conv net": DATA_LAYOUTS,
    "llama": (*DATA_LAYOUTS, *MODEL_LAYOUTS),
}
