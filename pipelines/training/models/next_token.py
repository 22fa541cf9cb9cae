"""The samples and the loss of next-token prediction, for any model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from pipelines.data.prepared import Prepared
from pipelines.data.synthetic import RandomWindows
from pipelines.data.windows import Batch, Samples, Windows
from pipelines.errors import UserError
from pipelines.settings import DataSettings
from pipelines.training.tensor.tensor_parallel import vocab_parallel_logits
from pipelines.training.workload.optimizer import OptimizerFactory
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.workload import (
    CustomLoss,
    LossSums,
    Metric,
    ModuleInputs,
    SeededSamples,
    Workload,
    nothing,
    output_losses,
    samples_in,
)

IGNORED = -100
"""The target of a position that the loss ignores."""


class NextToken:
    """The common part of workloads that predict tokens; see `Workload`.

    `cuts_head` is True if `tp` shards the logits over the vocabulary.
    """

    cuts_head = True
    custom_loss: CustomLoss | None = None
    divides_draws = False
    whole_parameters: Collection[str] = ()
    num_alike = 0
    """The number of blocks if these are all alike; 0: they may differ."""

    @property
    def why_unmergeable(self) -> str | None:
        return None

    def __init__(
        self, vocab_size: int, train: Samples, held_out: Samples | None, dtype: torch.dtype
    ) -> None:
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.train = train
        self.held_out = held_out
        self.digest = train.digest
        self.num_samples = train.num_samples
        self.seq_len = train.seq_len
        self.is_far = train.is_far
        self.has_readers = False
        self.optimizer_factory: OptimizerFactory | None = None
        self.metrics: dict[str, Metric] = {}
        self.has_constant_size = False
        self.num_held_out = held_out.num_samples if held_out else 0

    def with_blocks(self, number: int) -> Workload:
        """The same model with this many blocks; only if all are alike."""
        raise NotImplementedError

    def reach(self) -> None:
        for split in filter(None, (self.train, self.held_out)):
            split.reach()

    def read_ahead(self, passes: Iterable[Sequence[SeededSamples]]) -> None:
        """Nothing to do: reading is fast."""

    def prefetch(self, samples: Sequence[int], held_out: bool = False) -> None:
        self._split(held_out).prefetch(samples)

    def read(
        self,
        samples: Sequence[int],
        held_out: bool = False,
        interrupt: Callable[[], None] = nothing,
    ) -> Batch:
        split = self._split(held_out)
        split.fetch(samples, interrupt)
        return split.read(samples)

    def read_pass(
        self, parts: Sequence[SeededSamples], interrupt: Callable[[], None] = nothing
    ) -> Batch:
        return self.read(samples_in(parts), interrupt=interrupt)

    def seed_forward(self, seed: int) -> None:
        """Nothing to do: reading draws from generators of its own."""

    def _split(self, held_out: bool) -> Samples:
        if not held_out:
            return self.train
        assert self.held_out is not None, "evaluation without held-out samples"
        return self.held_out

    def empty(self, num_samples: int = 0, held_out: bool = False) -> Batch:
        shape = (num_samples, self.seq_len) if num_samples else (1, 1)
        tokens = torch.zeros(shape, dtype=torch.int64)
        return Batch(tokens, torch.full_like(tokens, IGNORED), None)

    def losses(self, module: nn.Module, fed: ModuleInputs, parallel: ParallelGroups) -> LossSums:
        return output_losses(self, module, fed, parallel)

    def num_tokens(self, targets: Tensor) -> Tensor:
        return (targets != IGNORED).sum()

    def loss(self, output: Tensor, targets: Tensor, parallel: ParallelGroups) -> Tensor:
        """The cross-entropy in nats, in float32 or better, summed over the targets."""
        logits = output.flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        tp = parallel.tp if self.cuts_head else None
        if tp is not None:
            logits = vocab_parallel_logits(logits, tp, self.vocab_size)
        total = functional.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total.to_local() if isinstance(total, DTensor) else total


def open_samples(
    data: DataSettings, vocab_size: int, seed: int, split: str, prepared: Prepared | None
) -> Samples:
    """Open one split of the data that the settings name.

    Raises `UserError` if the data are not prepared.
    """
    documents = not data.attend_across_documents
    if data.source == "random":
        return RandomWindows(
            split, data.seq_len, vocab_size=vocab_size, seed=seed, with_documents=documents
        )
    if prepared is None:
        raise UserError(f"data.source={data.source} is not prepared: run `elastic prepare` first")
    return Windows(prepared, split, data.seq_len, with_documents=documents)
