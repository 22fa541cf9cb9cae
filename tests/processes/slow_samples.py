"""A recipe whose samples take a while to arrive, and whose model takes a while to compute."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from pipelines.run.recipes import with_custom_model
from pipelines.settings import ReadingSettings, TrainSettings
from pipelines.settings.recipe import Recipe

SAMPLE_S = 0.005
SETTINGS = TrainSettings(batch=8, microbatch=4, steps=15, reading=ReadingSettings(num_readers=0))


class SlowVectors:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SAMPLE_S)
        return torch.full((256,), index / 64)


def recipe() -> Recipe:
    return Recipe(
        lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)),
        lambda module, vectors: (module(vectors) - vectors).square().mean(1),
        lambda named: torch.optim.AdamW((parameter for _, parameter in named), lr=0.01),
        SlowVectors,
        SETTINGS,
    )


CUSTOM_SETTINGS = with_custom_model(recipe()).settings
