"""Programs that record the microbatches of each pass, and a recipe whose passes may be merged."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from replica_program import program_with
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from pipelines.run.recipes import with_custom_model
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.replica.replica import ShardedReplica

PASSES_FILE = "PASSES_FILE"
"""The environment variable with the path of the file that records passes."""


class RecordsPasses(ShardedReplica):
    """Appends the step, the world size and the microbatches of each pass to a file."""

    def _feed_round(self, step: int, microbatches: Sequence[int]) -> Any:
        file = os.environ.get(PASSES_FILE)
        if file and self.groups.assignment.generation > 0 and microbatches:
            line = json.dumps([step, self.groups.layout.num_workers, list(microbatches)])
            with Path(file).open("a") as passes:
                passes.write(f"{line}\n")
        return super()._feed_round(step, microbatches)


records_passes = program_with(RecordsPasses)


class Sentences:
    """Sentences of the lengths 3 to 7, shortened at random as an augmentation would."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(1, 20, (4 + index % 5,), generator=generator)
        return words[: len(words) - int(torch.rand(()) < 0.3)]


def collate(sentences: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(sentences, batch_first=True)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(20, 8), nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 20)
    )


def token_losses(module: nn.Module, words: Tensor) -> Tensor:
    """The loss of each word, of shape (samples, words); 0 for padding."""
    logits = module(words[:, :-1]).transpose(1, 2)
    return cross_entropy(logits, words[:, 1:], ignore_index=0, reduction="none")


def loss_and_count(module: nn.Module, words: Tensor) -> tuple[Tensor, Tensor]:
    return token_losses(module, words).sum(), (words[:, 1:] > 0).sum()


def loss_of_each_sample(module: nn.Module, words: Tensor) -> Tensor:
    return token_losses(module, words).sum(1) / (words[:, 1:] > 0).sum(1)


NUM_STEPS = 12
SETTINGS = TrainSettings(
    batch=24,
    microbatch=1,
    steps=NUM_STEPS,
    dtype="float64",
    seed=3,
    eval_every=NUM_STEPS,
    eval_samples=2,
)


def make_recipe(loss: Any) -> Recipe:
    return Recipe(model, loss, adamw, Sentences, SETTINGS, collate=collate, held_out=Sentences)


def adamw(named: Sequence[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW((parameter for _, parameter in named), lr=0.01)


class Layer(nn.Module):
    """Attention and features of words, both with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.features = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2))

    def forward(self, hidden: Tensor) -> Tensor:
        attended = scaled_dot_product_attention(
            *self.qkv(hidden).chunk(3, -1), dropout_p=0.2, is_causal=True
        )
        return hidden + self.features(attended)


def model_with_dropout() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.2), Layer(), nn.Linear(8, 20))


class LongSentences(Sentences):
    """Sentences of one length, shuffled at random as an augmentation would."""

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 20, (8,), generator=generator)[torch.randperm(8)]


def dropout() -> Recipe:
    parts = model_with_dropout, loss_of_each_sample, adamw, LongSentences, SETTINGS
    return Recipe(*parts, held_out=LongSentences)


def counted() -> Recipe:
    return make_recipe(loss_and_count)


def by_sample() -> Recipe:
    return make_recipe(loss_of_each_sample)


CUSTOM_SETTINGS = with_custom_model(counted()).settings
