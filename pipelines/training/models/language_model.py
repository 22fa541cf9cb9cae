"""The workload of a transformer that predicts the next token of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from elastic.geometry.model_limits import Limits
from elastic.geometry.regions import Region, chunk_interval
from pipelines.data.synthetic import RandomWindows
from pipelines.data.windows import Batch, Samples
from pipelines.errors import UserError
from pipelines.settings import ExpertsSettings, TransformerSettings
from pipelines.training.models.next_token import NextToken
from pipelines.training.models.transformer import Transformer, initial_std
from pipelines.training.models.transformer_shape import transformer_shape
from pipelines.training.workload.initial_values import Constant, Normal, draw
from pipelines.training.workload.parallel_groups import ALONE, ParallelGroups
from pipelines.training.workload.ring import positions
from pipelines.training.workload.workload import ModelShape, ModuleInputs, nothing


class LanguageModelWorkload(NextToken):
    """A transformer trained on one split of windows and evaluated on another."""

    def __init__(
        self,
        settings: TransformerSettings,
        train: Samples,
        held_out: Samples | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Raises `UserError` if the data's vocabulary is larger than the model's."""
        if train.vocab_size > settings.vocab_size:
            raise UserError(
                f"model.vocab_size={settings.vocab_size}, but the data have a vocabulary of "
                f"{train.vocab_size} tokens: set model.vocab_size={train.vocab_size} or more"
            )
        super().__init__(settings.vocab_size, train, held_out, dtype)
        self.settings = settings
        self.num_alike = settings.num_layers

    def with_blocks(self, number: int) -> LanguageModelWorkload:
        settings = self.settings.model_copy(update={"num_layers": number})
        return LanguageModelWorkload(settings, self.train, self.held_out, self.dtype)

    def module(self, parallel: ParallelGroups = ALONE) -> nn.Module:
        return Transformer(self.settings, parallel)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return list(module.get_submodule("layers").children())

    def shape(self) -> ModelShape:
        return transformer_shape(self.settings, self.seq_len)

    def limits(self) -> Limits:
        return self.shape().limits

    @property
    def why_unmergeable(self) -> str | None:
        experts = self.settings.experts
        if experts and experts.balance_coefficient:
            return "the balance loss of the experts is that of a microbatch"
        return None

    def draw(
        self,
        name: str,
        shape: tuple[int, ...],
        region: Region,
        seed: int,
        interrupt: Callable[[], None] = nothing,
    ) -> Tensor:
        std = initial_std(name, self.settings)
        distribution = Constant(1.0) if len(shape) == 1 else Normal(0.0, std)
        return draw(distribution, name, seed, shape, region, interrupt)

    def feed(
        self, batch: Batch, device: torch.device, parallel: ParallelGroups, *seeds: int
    ) -> ModuleInputs:
        num_each = len(batch.tokens) // len(seeds)
        keywords = {"seeds": torch.tensor(seeds).repeat_interleave(num_each)}
        if batch.documents is not None:
            keywords["documents"] = batch.documents
        inputs, targets = batch.tokens, batch.targets
        if parallel.num_cp > 1:
            held = positions(batch.tokens.shape[1], parallel.cp_rank, parallel.num_cp)
            inputs, targets = inputs[:, held], targets[:, held]
        return ModuleInputs(inputs.to(device), keywords, targets.to(device))

    def flowing(self, layer: int, num_samples: int, parallel: ParallelGroups) -> Tensor:
        held = len(positions(self.seq_len, parallel.cp_rank, parallel.num_cp))
        if layer == 0:
            return torch.empty(num_samples, held, dtype=torch.int64, device="meta")
        if layer == self.settings.num_layers + 2:
            width = chunk_interval(self.settings.vocab_size, parallel.num_tp, parallel.tp_rank)[1]
        else:
            width, held = (
                self.settings.dim,
                chunk_interval(held, parallel.num_tp, parallel.tp_rank)[1],
            )
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
