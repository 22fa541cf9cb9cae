"""Next-token prediction on text, with a transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from elastic.regions import chunk_interval
from pipelines.data.prepared import Prepared
from pipelines.data.synthetic import RandomWindows
from pipelines.data.windows import Batch, Samples, Windows
from pipelines.errors import UserError
from pipelines.settings import DataSettings, ExpertsSettings, TransformerSettings
from pipelines.training.model import Transformer, initial_std
from pipelines.training.ring import positions
from pipelines.training.spread import ALONE, Spread
from pipelines.training.tensor_parallel import whole_vocabulary
from pipelines.training.transformer_shape import transformer_shape
from pipelines.training.workload import Fed, Shape, Sums, nothing, output_losses

IGNORED = -100
"""The target of a position that is not to be predicted."""


class LanguageModelWorkload:
    """A transformer trained on one split of windows and evaluated on another."""

    def __init__(
        self,
        settings: TransformerSettings,
        train: Samples,
        held_out: Samples | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Raises `UserError` if the data have more tokens than the model knows."""
        if train.vocab_size > settings.vocab_size:
            raise UserError(
                f"model.vocab_size={settings.vocab_size}, but the data have {train.vocab_size} "
                f"tokens: set model.vocab_size={train.vocab_size} or more"
            )
        self.settings = settings
        self.dtype = dtype
        self.train = train
        self.held_out = held_out
        self.digest = train.digest
        self.num_samples = train.num_samples
        self.seq_len = train.seq_len
        self.is_far = train.is_far
        self.optimising = None
        self.keeps_its_size = False
        self.num_held_out = held_out.num_samples if held_out else 0

    def module(self, spread: Spread = ALONE) -> nn.Module:
        return Transformer(self.settings, spread)

    def blocks(self, module: Transformer) -> Sequence[nn.Module]:
        return list(module.layers.values())

    def shape(self) -> Shape:
        return transformer_shape(self.settings, self.seq_len)

    def fill(self, name: str, tensor: Tensor, generator: Generator) -> None:
        if tensor.ndim == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=initial_std(name, self.settings), generator=generator)

    def reach(self) -> None:
        for split in filter(None, (self.train, self.held_out)):
            split.reach()

    def prefetch(self, samples: Sequence[int], held_out: bool = False) -> None:
        self._split(held_out).prefetch(samples)

    def read(
        self,
        samples: Sequence[int],
        held_out: bool = False,
        interrupt: Callable[[], None] = nothing,
    ) -> Batch:
        split = self._split(held_out)
        split.bring(samples, interrupt)
        return split.read(samples)

    def _split(self, held_out: bool) -> Samples:
        return self.held_out if held_out else self.train

    def empty(self, num_samples: int = 0) -> Batch:
        shape = (num_samples, self.seq_len) if num_samples else (1, 1)
        tokens = torch.zeros(shape, dtype=torch.int64)
        return Batch(tokens, torch.full_like(tokens, IGNORED), None)

    def feed(self, batch: Batch, device: torch.device, spread: Spread, seed: int) -> Fed:
        keywords = {"seeds": torch.full(batch.tokens.shape[:1], seed)}
        if batch.documents is not None:
            keywords["documents"] = batch.documents
        inputs, targets = batch.tokens, batch.targets
        if spread.num_cp > 1:
            held = positions(batch.tokens.shape[1], spread.cp_rank, spread.num_cp)
            inputs, targets = inputs[:, held], targets[:, held]
        return Fed(inputs.to(device), keywords, targets.to(device))

    def losses(self, module: nn.Module, fed: Fed, spread: Spread) -> Sums:
        return output_losses(self, module, fed, spread)

    def num_tokens(self, targets: Tensor) -> Tensor:
        return (targets != IGNORED).sum()

    def loss(self, output: Tensor, targets: Tensor, spread: Spread) -> Tensor:
        """The cross-entropy in nats, in float32 or better, summed over the targets."""
        logits = output.flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if spread.tp is not None:
            logits = whole_vocabulary(logits, spread.tp, self.settings.vocab_size)
        total = functional.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total.to_local() if spread.tp is not None else total

    def flowing(self, layer: int, num_samples: int, spread: Spread) -> Tensor:
        held = len(positions(self.seq_len, spread.cp_rank, spread.num_cp))
        if layer == 0:
            return torch.empty(num_samples, held, dtype=torch.int64, device="meta")
        if layer == self.settings.num_layers + 2:
            width = chunk_interval(self.settings.vocab_size, spread.num_tp, spread.tp_rank)[1]
        else:
            width, held = self.settings.dim, chunk_interval(held, spread.num_tp, spread.tp_rank)[1]
        shape = (num_samples, held, width)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

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
        return LanguageModelWorkload(settings, samples, samples, self.dtype)


def open_samples(
    data: DataSettings, vocab_size: int, seed: int, split: str, prepared: Prepared | None
) -> Samples:
    """One split of the data that the settings name, `prepared`.

    Raises `UserError` if there is nothing usable there.
    """
    documents = not data.attend_across_documents
    if data.source == "random":
        return RandomWindows(
            split, data.seq_len, vocab_size=vocab_size, seed=seed, with_documents=documents
        )
    if prepared is None:
        raise UserError(f"data.source={data.source}: is not prepared; run `elastic prepare` first")
    return Windows(prepared, split, data.seq_len, with_documents=documents)
