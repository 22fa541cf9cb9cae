"""Next-token prediction on text, with a transformer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from pipelines.data.synthetic import RandomWindows
from pipelines.data.windows import Batch, Samples, Windows
from pipelines.errors import UserError
from pipelines.settings import DataSettings, ExpertsSettings, TransformerSettings
from pipelines.training.model import Transformer, document_mask, initial_std

IGNORED = -100
"""The target of a position that is not to be predicted."""


class LanguageModelWorkload:
    """A transformer trained on one split of windows and evaluated on another."""

    def __init__(
        self, settings: TransformerSettings, train: Samples, held_out: Samples | None
    ) -> None:
        """Raises `UserError` if the data have more tokens than the model knows."""
        if train.vocab_size > settings.vocab_size:
            raise UserError(
                f"model.vocab_size={settings.vocab_size}, but the data have {train.vocab_size} "
                f"tokens: set model.vocab_size={train.vocab_size} or more"
            )
        self.settings = settings
        self.train = train
        self.held_out = held_out
        self.digest = train.digest
        self.num_samples = train.num_samples
        self.num_held_out = held_out.num_samples if held_out else 0

    def module(self) -> nn.Module:
        return Transformer(self.settings)

    def blocks(self, module: Transformer) -> Sequence[nn.Module]:
        return list(module.layers)

    def fill(self, name: str, tensor: Tensor, generator: Generator) -> None:
        if tensor.ndim == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=initial_std(name, self.settings), generator=generator)

    def read(self, samples: Sequence[int], held_out: bool = False) -> Batch:
        split = self.held_out if held_out else self.train
        return split.read(samples)

    def empty(self) -> Batch:
        one = torch.zeros(1, 1, dtype=torch.int64)
        return Batch(one, torch.full_like(one, IGNORED), None)

    def num_tokens(self, batch: Batch) -> int:
        return int((batch.targets != IGNORED).sum())

    def loss(self, module: nn.Module, batch: Batch, device: torch.device) -> Tensor:
        """The cross-entropy in nats, in float32 or better, summed over the targets."""
        mask = None if batch.documents is None else document_mask(batch.documents, device)
        counted = self.num_tokens(batch) > 0
        logits = module(batch.tokens.to(device), mask, counted).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = batch.targets.to(device).flatten()
        return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    def miniature(self) -> LanguageModelWorkload:
        experts = ExpertsSettings(num_experts=2, top_k=2, hidden_dim=8, shared_hidden_dim=8)
        settings = TransformerSettings(
            vocab_size=8,
            dim=8,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            hidden_dim=8,
            experts=self.settings.experts and experts,
        )
        samples = RandomWindows("train", 4, vocab_size=8, num_samples=8)
        return LanguageModelWorkload(settings, samples, samples)


def open_samples(
    data: DataSettings, vocab_size: int, seed: int, split: str, folder: Path | None
) -> Samples:
    """One split of the data that the settings name; `folder` holds them prepared.

    Raises `UserError` if there is nothing usable there.
    """
    documents = not data.attend_across_documents
    if data.source == "random":
        return RandomWindows(
            split, data.seq_len, vocab_size=vocab_size, seed=seed, with_documents=documents
        )
    if folder is None:
        raise UserError(f"data.source={data.source}: is not prepared; run `elastic prepare` first")
    return Windows(folder, split, data.seq_len, with_documents=documents)
